"""Kernels that are compiled: what registering them survives, and the suite for them.

Each plugin is installed in a folder, and used in a process of its own.
"""

import functools
import os
import re
import shutil
import subprocess
import zipfile
from pathlib import Path

import jax.ffi
import pytest

from interception_core import _compat
from interception_core.plugins.records import discover
from jaxtap_testkit.processes import run_python

COMPILER = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
HERE = Path(__file__).parent

# What this environment has, and these tests are not about.
OTHERS = [found.name for found in discover() if found.distribution != "interception-core"]

pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs a C++ compiler")

FFI = """
import ctypes

import jax
from interception_core import FfiTarget

LIBRARY = ctypes.CDLL({library!r})


def capsule(symbol):
    return jax.ffi.pycapsule(LIBRARY[symbol])


def result(symbol):
    function = LIBRARY[symbol]
    function.restype = ctypes.c_void_p
    return jax.ffi.pycapsule(ctypes.c_void_p(function()))


def handlers():
    version = {version!r} or (LIBRARY.AcmeFfiMajor(), LIBRARY.AcmeFfiMinor())
    types = {{
        name: {{part: result(symbol) for part, symbol in parts.items()}}
        for name, parts in {types!r}.items()
    }}
    return {{
        target: FfiTarget({{stage: capsule(s) for stage, s in stages.items()}}, version, types)
        for target, stages in {targets!r}.items()
    }}
"""

PLUGIN = """
from interception_core import KernelSpec, hookimpl

API = (1, 1)


@hookimpl
def jaxtap_register_kernels():
    return [
        KernelSpec(target, "cpu", "{package}.ffi:handlers", op=target.partition(".")[2].lower())
        for target in {targets!r}
    ]
"""

SCALE = {"acme.scale": {"execute": "AcmeScale"}}
COUNT = {"acme.count": {"instantiate": "AcmeCountNew", "execute": "AcmeCount"}}
COUNTER = {"acme.Counter": {"type_id": "AcmeCounterId", "type_info": "AcmeCounterInfo"}}

# What each of the processes begins with. `refused` is the test's question: is the offender named,
# twice in the same words, and does JAX work?
PRELUDE = """
import jax, numpy as np
from interception_core import (
    KernelError, KernelSpec, declared_specs, get_op, register_kernel, select_kernel
)

def spec(target):
    (found,) = [one for one in declared_specs(KernelSpec) if one.target == target]
    return found

def refused(spec, *parts):
    messages = []
    for _ in range(2):
        try:
            register_kernel(spec)
        except KernelError as error:
            messages.append(str(error))
        else:
            raise AssertionError("it was registered")
    assert messages[0] == messages[1], messages
    for part in parts:
        assert part in messages[0], messages[0]
    works()
    return messages[0]

def works():
    assert [device.platform for device in jax.devices()] == ["cpu"]
    assert jax.numpy.ones(3).sum() == 3

def call(target, x, result=None, **params):
    result = jax.ShapeDtypeStruct(np.shape(x), np.float32)
    return jax.jit(lambda x: jax.ffi.ffi_call(target, result)(x, **params))(x)

X = np.arange(3, dtype=np.float32)
"""


@pytest.fixture(scope="module")
def compiled(built_once):
    """Compiles handlers.cc, with the headers of this jaxlib or with newer ones."""

    def compile(folder, name):
        include = Path(jax.ffi.include_dir())
        if name == "newer":
            include = shutil.copytree(include, folder / "include")
            header = include / "xla/ffi/api/c_api.h"
            header.chmod(0o644)
            text = re.sub(r"(#define XLA_FFI_API_MINOR) \d+", r"\1 99", header.read_text())
            header.write_text(text)
        flags = ["-std=c++17", "-O0", "-w", "-fPIC", "-shared", f"-I{include}"]
        command = [COMPILER, *flags, str(HERE / "handlers.cc"), "-o", str(folder / "library.so")]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr

    def make(name):
        build = functools.partial(compile, name=name)
        return built_once(f"handlers-{name}", build) / "library.so"

    return make


def lay_out(folder, compiled, name, targets, types=(), library="this", version=None):
    """Puts a plugin with these targets there as an installer would."""
    package = folder / f"{name}_kernels"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "plugin.py").write_text(PLUGIN.format(package=package.name, targets=[*targets]))
    fields = {"version": version, "types": dict(types), "targets": targets}
    (package / "ffi.py").write_text(FFI.format(library=str(compiled(library)), **fields))
    info = folder / f"{name}_kernels-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}-kernels\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[jaxtap]\n{name} = {package.name}.plugin\n")


def start(folder, *words, disable=(), check=False):
    """Runs Python where the plugins of a folder are installed, and no others."""
    environ = {name: None for name in os.environ if name.startswith("JAXTAP_")}
    environ |= {"PYTHONPATH": str(folder)}
    environ["JAXTAP_DISABLE_PLUGINS"] = ",".join([*OTHERS, *disable])
    return run_python(*words, strict=False, check=check, **environ)


@pytest.fixture
def install(tmp_path, compiled):
    """Installs a plugin that has these targets."""
    return lambda *args, **options: lay_out(tmp_path, compiled, *args, **options)


@pytest.fixture
def python(tmp_path):
    """Runs Python, which is to succeed."""

    def run(*words, check=True, **options):
        return start(tmp_path, *words, check=check, **options)

    return run


@pytest.fixture
def script(python):
    """Runs a script after the prelude."""
    return lambda code, **options: python("-c", PRELUDE + code, **options).stdout


# Functions that are to return handlers, and what is said of them.
BAD = {
    "raise RuntimeError('no licence')": "failed: RuntimeError: no licence",
    "raise SystemExit('enough')": "failed: SystemExit: enough",
    "import nowhere": "failed: ModuleNotFoundError",
    "return {}": "must return a mapping from 'bad.k3' to an FfiTarget, got []",
    "return 3": "must return a mapping from 'bad.k4' to an FfiTarget, got 3",
    "return {'bad.k5': 3}": "to an FfiTarget, got ['bad.k5']",
    "return {'bad.k6': FfiTarget({}, (0, 3))}": "FfiTarget.stages must map 'execute'",
    "return {'bad.k7': FfiTarget({'execute': 3}, (0, 3))}": "must be a PyCapsule",
}


class TestRegistering:
    @pytest.mark.slow
    def test_a_kernel_is_registered_once_and_called(self, install, script):
        install("acme", SCALE)
        script("""
assert "jax" in __import__("sys").modules
assert "acme_kernels.ffi" not in __import__("sys").modules
scale = select_kernel("scale", "cpu", (X,)).spec
assert register_kernel(scale) == register_kernel(scale) == "acme.scale"
np.testing.assert_array_equal(call("acme.scale", X, factor=np.float32(3)), 3 * X)
works()
""")

    def test_by_many_threads_at_once_and_what_is_refused(self, install, script, tmp_path):
        """All in one process, since starting JAX takes most of the time.

        What is refused: a platform that is not there, and handlers that cannot be had.
        """
        install("acme", SCALE | COUNT, COUNTER)
        install("bad", {f"bad.k{index}": {} for index in range(len(BAD))})
        plugin = tmp_path / "bad_kernels" / "plugin.py"
        plugin.write_text(plugin.read_text().replace(':handlers"', ':" + target[4:]'))
        functions = [f"def k{index}():\n    {body}\n" for index, body in enumerate(BAD)]
        ffi = "".join(["from interception_core import FfiTarget\n", *functions])
        (tmp_path / "bad_kernels" / "ffi.py").write_text(ffi)
        script(f"""
import dataclasses, threading
start, names = threading.Barrier(8), []
def ask(name):
    start.wait()
    names.append(register_kernel(spec(name)))
threads = [threading.Thread(target=ask, args=(name,)) for name in ("acme.scale", "acme.count") * 4]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert sorted(names) == ["acme.count"] * 4 + ["acme.scale"] * 4
works()
elsewhere = dataclasses.replace(spec("acme.scale"), platform="cuda")
refused(elsewhere, "'acme.scale@cuda'", "this process has no cuda backend")
for index, part in enumerate({[*BAD.values()]!r}):
    owner = f"Kernel 'bad.k{{index}}@cpu' of plugin 'bad' (bad-kernels 1.0)"
    refused(spec(f"bad.k{{index}}"), owner, part)
register_kernel(spec("acme.scale"))
""")

    @pytest.mark.slow
    def test_what_the_headers_say_is_what_the_runtime_says(self, install, script):
        install("acme", {"acme.version": {"execute": "AcmeVersion"}})
        text = script("""
register_kernel(spec("acme.version"))
result = jax.ShapeDtypeStruct((2,), np.int32)
print(jax.jit(lambda: jax.ffi.ffi_call("acme.version", result)())())
""")
        assert tuple(map(int, re.findall(r"\d+", text))) == _compat.ffi_api_version()


@pytest.mark.slow
class TestOneName:
    def test_two_plugins_with_one_target(self, install, script):
        install("acme", SCALE | COUNT, COUNTER)
        install("rival", {"acme.scale": {"execute": "AcmeShort"}})
        code = """
import warnings
warnings.simplefilter("ignore")
assert [one.target for one in declared_specs(KernelSpec)] == ["acme.count"]
for package in ("acme", "rival"):
    contested = KernelSpec("acme.scale", "cpu", f"{package}_kernels.ffi:handlers", "scale")
    refused(contested, "plugin 'acme' (acme-kernels 1.0)", "plugin 'rival' (rival-kernels 1.0)",
            "JAXTAP_DISABLE_PLUGINS=rival")
register_kernel(spec("acme.count"))
"""
        script(code)
        disabled = 'register_kernel(spec("acme.scale")); works()'
        script(disabled, disable=["rival"])

    def test_a_target_that_other_code_has_registered(self, install, script):
        """Before the backend starts, and after."""
        install("acme", SCALE)
        for start in ("", "jax.devices()\n"):
            script(f"""
{start}from acme_kernels import ffi
jax.ffi.register_ffi_target("acme.scale", {{"execute": ffi.capsule("AcmeScale")}}, platform="cpu")
refused(spec("acme.scale"), "plugin 'acme' (acme-kernels 1.0)", "'acme.scale@cpu'",
        "other code than jaxtap has registered it", "JAXTAP_DISABLE_PLUGINS=acme")
""")

    def test_a_spec_that_is_not_the_plugin_s(self, install, script):
        install("acme", SCALE)
        script("""
import dataclasses
other = dataclasses.replace(spec("acme.scale"), handlers="acme_kernels.ffi:others")
refused(other, "'acme.scale@cpu'", "plugin 'acme' (acme-kernels 1.0)", "Rename it")
register_kernel(spec("acme.scale"))
""")

    def test_specs_that_no_plugin_declares(self, install, script):
        install("acme", {})
        install("other", SCALE)
        script("""
from interception_core import KernelSpec
first = KernelSpec("acme.scale2", "cpu", "other_kernels.ffi:handlers", "scale")
refused(first, "'acme.scale2@cpu' (which no plugin declares)", "got ['acme.scale']")
refused(KernelSpec("acme.scale2", "cpu", "other_kernels.ffi:others", "scale"), "belongs to")
""")


@pytest.mark.slow
class TestVersions:
    def test_a_handler_of_newer_headers(self, install, script):
        install("acme", SCALE | COUNT, COUNTER, library="newer")
        install("other", {"other.scale": {"execute": "AcmeScale"}})
        major, minor = _compat.ffi_api_version()
        script(f"""
for target in ("acme.scale", "acme.count"):
    message = refused(spec(target), "plugin 'acme' (acme-kernels 1.0)", repr(target + "@cpu"),
                      "XLA FFI {major}.99", "{_compat.jaxlib_version}", "{major}.{minor}",
                      "oldest jaxlib", "JAXTAP_DISABLE_PLUGINS=acme")
register_kernel(spec("other.scale"))
assert call("other.scale", X, factor=np.float32(2))[1] == 2
""")

    @pytest.mark.parametrize("version", [(0, 0), (0, 3)])
    def test_one_that_says_it_is_older(self, install, script, version):
        """XLA asks the handler itself. That is no harm where the backend runs already."""
        install("acme", SCALE, library="newer", version=version)
        major, minor = _compat.ffi_api_version()
        script(f"""
refused(spec("acme.scale"), "plugin 'acme' (acme-kernels 1.0)", "XLA refuses it",
        "handler's API version ({major}.99)", "framework's API version ({major}.{minor})")
try:
    call("acme.scale", X, factor=np.float32(2))
except jax.errors.JaxRuntimeError as error:
    assert "acme.scale" in str(error)
else:
    raise AssertionError("it is there all the same")
works()
""")

    def test_another_major_version(self, install, script):
        install("acme", SCALE, version=(1, 0))
        script('refused(spec("acme.scale"), "plugin \'acme\'", "XLA FFI 1.0")')

    def test_without_the_headers_xla_is_the_one_to_check(self, install, script):
        install("acme", SCALE, library="newer")
        script("""
from interception_core import _compat
from interception_core.plugins.records import discover
_compat.ffi_api_version = lambda: None
refused(spec("acme.scale"), "plugin 'acme'", "XLA refuses it", ".99)")
""")


@pytest.mark.slow
class TestStates:
    COUNTS = """
fn = jax.jit(lambda: jax.ffi.ffi_call("acme.count", jax.ShapeDtypeStruct((), np.int32))())
assert [int(fn()) for _ in range(3)] == [1, 2, 3]
works()
"""

    def test_registered_before_the_backend_exists(self, install, script):
        install("acme", COUNT, COUNTER)
        script('register_kernel(spec("acme.count"))' + self.COUNTS)

    def test_without_jaxtap_the_backend_would_not_start(self, install, python):
        """What all this is for: should JAX mend it, the registry could be simpler."""
        install("acme", COUNT, COUNTER)
        code = """
import jax
from acme_kernels import ffi
target = ffi.handlers()["acme.count"]
for name, capsules in target.types.items():
    jax.ffi.register_ffi_type(name, capsules, platform="cpu")
jax.ffi.register_ffi_target("acme.count", dict(target.stages), platform="cpu")
try:
    jax.devices()
except RuntimeError as error:
    assert "Types used by FFI handlers must be registered" in str(error), error
else:
    raise AssertionError("the backend started")
"""
        python("-c", code)

    def test_kernels_of_one_plugin_may_share_a_state(self, install, script):
        again = {"acme.again": COUNT["acme.count"]}
        install("acme", COUNT | again, COUNTER)
        both = 'for name in ("acme.count", "acme.again"): register_kernel(spec(name))'
        script(both + self.COUNTS)

    def test_a_state_without_its_type(self, install, script):
        install("acme", COUNT | SCALE)
        script("""
refused(spec("acme.count"), "plugin 'acme' (acme-kernels 1.0)", "'acme.count@cpu'",
        "Types used by FFI handlers must be registered")
register_kernel(spec("acme.scale"))
""")

    def test_two_plugins_with_one_type_name(self, install, script, compiled, tmp_path):
        install("acme", COUNT, COUNTER)
        install("rival", {"rival.count": COUNT["acme.count"]}, COUNTER)
        # A library of its own has an id of its own.
        another = shutil.copy(compiled("this"), tmp_path / "another.so")
        ffi = tmp_path / "rival_kernels" / "ffi.py"
        ffi.write_text(ffi.read_text().replace(str(compiled("this")), str(another)))
        script(
            """
register_kernel(spec("acme.count"))
refused(spec("rival.count"), "plugin 'rival' (rival-kernels 1.0)", "state type 'acme.Counter'",
        "plugin 'acme' (acme-kernels 1.0) has a type of that name")
"""
            + self.COUNTS
        )


class TestHandlers:
    @pytest.mark.slow
    def test_an_exception_becomes_a_jax_error(self, install, script):
        install("acme", SCALE | {"acme.throws": {"execute": "AcmeThrows"}})
        script("""
for name in ("acme.scale", "acme.throws"):
    register_kernel(spec(name))
for _ in range(2):
    try:
        jax.block_until_ready(call("acme.throws", X, factor=np.float32(1)))
    except jax.errors.JaxRuntimeError as error:
        assert "acme.throws: out of luck" in str(error)
    else:
        raise AssertionError("no error")
    works()
np.testing.assert_array_equal(call("acme.scale", X, factor=np.float32(3)), 3 * X)
""")

    @pytest.mark.slow
    def test_whose_module_cannot_be_imported(self, install, script, tmp_path):
        install("acme", SCALE)
        (tmp_path / "acme_kernels" / "ffi.py").write_text("import nowhere")
        script("""refused(spec("acme.scale"), "plugin 'acme'", "cannot load", "nowhere")""")


@pytest.mark.slow
class TestDoctor:
    def test_says_of_each_kernel_whether_it_can_be_registered(self, install, python):
        install("acme", SCALE | COUNT, COUNTER)
        good = python("-m", "interception_core", "doctor").stdout
        assert "ok    acme.count@cpu of plugin 'acme' (acme-kernels 1.0)" in good
        install("broken", {"broken.count": COUNT["acme.count"]}, COUNTER, library="newer")
        done = python("-m", "interception_core", "doctor", check=False)
        assert done.returncode == 1
        assert "ok    acme.scale@cpu of plugin 'acme' (acme-kernels 1.0)" in done.stdout
        assert "fail  Kernel 'broken.count@cpu' of plugin 'broken'" in done.stdout
        assert "must be built with headers of XLA FFI" in done.stdout


SUITE = {
    "registered": "test_it_can_be_registered_more_than_once",
    "used": "test_the_op_ends_up_in_this_kernel",
    "equal": "test_equals_the_reference",
    "jit": "test_jit",
    "first": "test_vmap[first]",
    "all": "test_vmap[all]",
    "scan": "test_scan",
    "export": "test_export",
    "empty": "test_empty_operands",
    "wrong": "test_wrong_operands_are_refused",
}

# Which tests a kernel fails in; the others pass.
FAULTS = {
    "Scale": "",
    "Generated": "",
    "Short": "equal jit first all scan export wrong",
    "Stale": "equal jit first all scan export wrong",
    "OneRow": "first all",
    "Careless": "wrong",
    "NonEmpty": "empty",
    "Elsewhere": "used export",
    "Undeclared": "registered used export",
}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory, compiled):
    """What became of each test of suites.py."""
    folder = tmp_path_factory.mktemp("conformance")
    names = ("Scale", "Short", "Stale", "OneRow", "Careless")
    lay_out(folder, compiled, "acme", {f"acme.{one}": {"execute": f"Acme{one}"} for one in names})
    words = ["-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-q", "--tb=line", "-rA"]
    done = start(folder, *words, str(HERE / "suites.py"))
    pattern = r"^(PASSED|FAILED|ERROR) \S*::Test(\w+)::(test_\w+(?:\[\w+\])?)"
    found = re.findall(pattern, done.stdout, re.MULTILINE)
    by_test = {(name, test): outcome for outcome, name, test in found}
    wanted = {(name, test) for name in FAULTS for test in SUITE.values()}
    assert set(by_test) == wanted, done.stdout + done.stderr
    return by_test


@pytest.mark.slow
class TestConformance:
    @pytest.mark.parametrize("name", FAULTS)
    def test_a_wrong_kernel_is_caught(self, outcomes, name):
        failed = {short for short, test in SUITE.items() if outcomes[name, test] != "PASSED"}
        assert failed == set(FAULTS[name].split())


@pytest.mark.slow
class TestGuide:
    """docs/kernels.md, word for word: built as a wheel, installed, used and tested."""

    @pytest.fixture
    def blocks(self):
        text = (HERE.parents[3] / "docs" / "kernels.md").read_text()
        found = re.findall(r"```\w+\n(?:#|//) (\S+)\n(.*?)```", text, re.DOTALL)
        assert len(found) == text.count("```") // 2, "every code block begins with its name"
        return dict(found)

    def test_the_kernel_of_the_guide(self, blocks, tmp_path, python):
        source = tmp_path / "source"
        for path, text in blocks.items():
            if "." in path:
                (source / path).parent.mkdir(parents=True, exist_ok=True)
                (source / path).write_text(text)
        command = ["-m", "build", "--wheel", "--no-isolation", "--skip-dependency-check"]
        python(*command, str(source))
        (wheel,) = (source / "dist").glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(tmp_path)
        python("-c", blocks["choose"] + blocks["use"])
        timed = python("-m", "interception_core", "bench", "softcap", "--seconds", "0").stdout
        head, *lines = timed.splitlines()
        assert head.split("  ")[-1].strip() == "kernel/copy"
        assert [line.split()[0] for line in lines] == ["1", "64", "4096"]
        words = ["-n", "0", "-p", "no:cacheprovider", "-q", "--rootdir", str(source)]
        done = python("-m", "pytest", *words, "-c", os.devnull, str(source / "test_softcap.py"))
        assert f"{len(SUITE)} passed" in done.stdout
