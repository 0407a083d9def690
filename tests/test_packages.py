"""Each package installs by itself, with what it needs and nothing else."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
from filelock import FileLock

ROOT = Path(__file__).parent.parent
PACKAGES, TESTKIT = ROOT / "packages", ROOT / "testkit"
UV = os.environ.get("UV") or shutil.which("uv")
NEEDS = {
    "interception-core": ["interception-core"],
    "hijax-trace": ["interception-core", "hijax-trace"],
    "quant-numerics": ["interception-core", "hijax-trace", "quant-numerics"],
    "quant-optim": ["quant-optim"],
    "provider-xla": ["interception-core", "hijax-trace", "quant-numerics", "provider-xla"],
    "provider-xla-cache": [
        "interception-core",
        "hijax-trace",
        "quant-numerics",
        "provider-xla",
        "provider-xla-cache",
    ],
    "provider-xla-formats": [
        "interception-core",
        "hijax-trace",
        "quant-numerics",
        "provider-xla",
        "provider-xla-formats",
    ],
    "provider-xla-fused": [
        "interception-core",
        "hijax-trace",
        "quant-numerics",
        "provider-xla",
        "provider-xla-fused",
    ],
    "provider-xla-lora": [
        "interception-core",
        "hijax-trace",
        "quant-numerics",
        "provider-xla",
        "provider-xla-lora",
    ],
    "provider-xla-models": [
        "interception-core",
        "hijax-trace",
        "quant-numerics",
        "provider-xla",
        "provider-xla-models",
    ],
    "provider-xla-passes": [
        "interception-core",
        "hijax-trace",
        "quant-numerics",
        "provider-xla",
        "provider-xla-passes",
    ],
    "provider-xla-report": [
        "interception-core",
        "hijax-trace",
        "quant-numerics",
        "provider-xla",
        "provider-xla-report",
    ],
    "provider-xla-serve": [
        "interception-core",
        "hijax-trace",
        "quant-numerics",
        "provider-xla",
        "provider-xla-serve",
    ],
    "provider-odml": ["interception-core", "hijax-trace", "quant-numerics", "provider-odml"],
    "provider-odml-export": [
        "interception-core",
        "hijax-trace",
        "quant-numerics",
        "provider-odml",
        "provider-odml-export",
    ],
    "provider-odml-aeq": [
        "interception-core",
        "hijax-trace",
        "quant-numerics",
        "provider-odml",
        "provider-odml-export",
        "provider-odml-aeq",
    ],
    "jaxtap-llm": [
        "interception-core",
        "hijax-trace",
        "quant-numerics",
        "provider-xla",
        "provider-xla-cache",
        "provider-xla-formats",
        "provider-xla-fused",
        "provider-xla-lora",
        "provider-xla-passes",
        "provider-xla-serve",
        "te-ffi-kernels",
        "jaxtap-llm",
    ],
    "te-ffi-kernels": ["interception-core", "te-ffi-kernels"],
    "te-ffi-kernels-cuda13": ["interception-core", "te-ffi-kernels", "te-ffi-kernels-cuda13"],
}
CHECKS = {
    "interception-core": "import interception_core as ic; assert len(ic.plugins()) == 1; "
    "ic.get_engine('patch')",
    "hijax-trace": "import interception_core as ic, hijax_trace as ht; "
    "assert isinstance(ic.get_engine(), ht.TraceEngine); ht.Box(1).get()",
    "quant-numerics": "import quant_numerics as qn; qn.quantize([1.0, 2.0], 'int8')",
    "quant-optim": "import quant_optim as qo, jax.numpy as jnp; "
    "qo.adamw_8bit(1e-3).init(jnp.ones((64, 128)))",
    "provider-xla": "import interception_core as ic; ic.get_provider('qt').apply(len); "
    "import jax.numpy as jnp; w = jnp.eye(4); "
    "plan = ic.get_provider('ptq').plan(jnp.dot, w, w); "
    "plan.apply(jnp.dot)(plan.quantize(w), w)",
    "provider-xla-cache": "import provider_xla as xla, jax.numpy as jnp; c = jnp.ones((2, 4, 8)); "
    "step = lambda p, x, c: (jnp.einsum('bd,btd->bt', x @ p, c), c.at[:, 0].set(x)); "
    "plan = xla.PtqProvider(xla.CacheRule('c')).plan(step, jnp.eye(8), c[:, 0], c); "
    "assert plan.caches['args[2]'].axis == 2, plan",
    "provider-xla-formats": "import provider_xla as xla, provider_xla_formats as formats; "
    "assert xla.load_gguf is formats.load_gguf",
    "provider-xla-fused": "import jax, provider_xla as xla, jax.numpy as jnp; w = jnp.eye(4); "
    "plan = xla.PtqProvider(xla.QuantizationRule(kernel='fused')).plan(jax.nn.softmax, w); "
    "assert 'softmax' in str(plan), plan",
    "provider-xla-lora": "import jax, provider_xla as xla, jax.numpy as jnp; w = jnp.eye(4); "
    "plan = xla.PtqProvider(xla.Rule(weight='int8', lora=2)).plan(jnp.dot, w, w); "
    "adapters = plan.init_adapters(jax.random.key(0)); stored = plan.quantize(w); "
    "plan.apply()(stored, w, adapters=adapters); plan.merge(stored, adapters)",
    "provider-xla-models": "import interception_core as ic; "
    "names = {spec.name for spec in ic.declared_specs(ic.BridgeSpec)}; "
    "assert names == {'nnx', 'linen', 'equinox'}, names; "
    "import provider_xla as xla; xla.quantize_model, xla.merge_model",
    "provider-xla-passes": "import provider_xla as xla, jax.numpy as jnp; w = jnp.eye(4); "
    "plan = xla.PtqProvider('int8').plan(jnp.dot, w, w); "
    "plan.optimize(w, [(w,)], [xla.SmoothQuant()]); plan.allocate(w, w, budget_bits=40)",
    "provider-xla-report": "import provider_xla as xla, jax.numpy as jnp; w = jnp.eye(4); "
    "report = xla.PtqProvider('int8').plan(jnp.dot, w, w).report(w, w); "
    "report.save_html('page.html')",
    "provider-xla-serve": "import provider_xla as xla, jax.numpy as jnp; w = jnp.eye(4); "
    "plan = xla.PtqProvider('int8').plan(jnp.dot, w, w); stored = plan.quantize(w); "
    "program = xla.load_exported(plan.export(stored, w).serialize()); program(stored, w)",
    "provider-odml": "import interception_core as ic, jax.numpy as jnp, provider_odml as odml; "
    "w = jnp.eye(4); model = ic.get_provider('odml-qat').apply(jnp.dot); "
    "stats = model.init(w, w); model(w, w, quant_stats=stats); assert len(stats) == 2\n"
    "try: odml.export(jnp.dot, w, stats, [model.provider.rules[0]], w)\n"
    "except odml.MissingExtraError as error: assert 'provider-odml[export]' in str(error)\n"
    "else: raise AssertionError('exported without provider-odml-export')",
    "provider-odml-export": "import jax.numpy as jnp, provider_odml as odml; w = jnp.eye(4); "
    "rules = [odml.OdmlRule(weight_qtype='int8')]; "
    "art = odml.export(jnp.dot, w, None, rules, w); assert art.report.outputs, art.report",
    "provider-odml-aeq": "import interception_core as ic, provider_odml as odml; "
    "assert isinstance(ic.get_export_backend('aeq', algorithm='mse'), odml.ExportBackend)",
    "jaxtap-llm": "import jaxtap_llm; assert jaxtap_llm.Recipe().rank == 16\n"
    "try: import jaxtap_llm.device\n"
    "except jaxtap_llm.LlmError as error: assert 'jaxtap-llm[device]' in str(error)\n"
    "else: raise AssertionError('imported without LiteRT')",
    "te-ffi-kernels": "import jax.numpy as jnp, te_ffi_kernels as te; "
    "w = te.pack_w8(jnp.eye(4, dtype=jnp.int8), jnp.ones((1, 4))); "
    "assert (te.gemm_w8a16(jnp.ones(4), w) == 1).all(); assert te.warm_counts()",
    "te-ffi-kernels-cuda13": "import te_ffi_kernels_cuda13 as kernels; "
    "assert 'no kernels' in kernels.status(); import jax.numpy as jnp, te_ffi_kernels as te; "
    "assert (te.softmax(jnp.zeros((2, 4))) == 0.25).all()",
}
# Exits with what is imported anywhere in a folder's files and is not installed.
IMPORTS = """
import ast, importlib.util, pathlib, sys
names = set()
for file in pathlib.Path(sys.argv[1]).rglob("*.py"):
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {(alias.name.partition(".")[0], file.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names.add((node.module.partition(".")[0], file.name))
missing = [name for name in names if importlib.util.find_spec(name[0]) is None]
sys.exit(f"not installed: {missing}" if missing else 0)
"""
if importlib.util.find_spec("te_ffi_kernels") is None:
    # There is no compiler: see CONTRIBUTING.md.
    del NEEDS["te-ffi-kernels"], NEEDS["te-ffi-kernels-cuda13"], NEEDS["jaxtap-llm"]


def run(*command, cwd=None):
    result = subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture
def distribution(built_once):
    """Return ``get(package, pattern)``: its sdist, or the wheel that is built from that."""

    def get(package, pattern):
        folder = TESTKIT if package == "jaxtap-testkit" else PACKAGES / package
        # Whether C++ is built from the sdist is tested: neither optimized nor with what debuggers
        # read, which take two thirds of the time.
        build = [UV, "build", "-C", "cmake.build-type=None", folder, "-o"]
        dist = built_once(f"dist-{package}", lambda to: run(*build, to, cwd=to))
        (found,) = dist.glob(pattern)
        return found

    return get


@pytest.fixture
def python(built_once, monkeypatch):
    """Return the Python of an environment that tests have in turns, empty at first.

    The files of one path are compiled once: those of JAX and of frameworks take 20 CPU seconds.
    """

    def build(folder):
        run(UV, "venv", "--python", sys.executable, folder / "environment")

    folder = built_once("packages", build)
    python = folder / "environment" / "bin" / "python"
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(folder / "compiled"))
    with FileLock(folder / "lock"):
        yield python


@pytest.mark.slow
@pytest.mark.parametrize("package", NEEDS)
def test_alone(package, distribution, python, tmp_path):
    """It works with what it needs and nothing else; its tests, with its extra and the helpers."""
    needed = [distribution(name, "*.whl") for name in NEEDS[package]]

    def install(*wanted):
        run(UV, "pip", "install", "--python", python, *wanted)

    install("--exact", *needed)
    run(python, "-W", "error", "-c", CHECKS[package], cwd=tmp_path)
    typed = (
        "from importlib.resources import files; assert files({!r}).joinpath('py.typed').is_file()"
    )
    run(python, "-c", typed.format(package.replace("-", "_")), cwd=tmp_path)
    installed = run(UV, "pip", "list", "--python", python)
    for other in NEEDS.keys() - set(NEEDS[package]):
        assert other not in installed

    # Packagers have the tests from the sdist alone, without those of other packages.
    sdist = distribution(package, "*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path / "source", filter="data")
    # Extras of provider-xla, which tests ask for by the library that they are for, bring these.
    beside = ["provider-xla-formats", "provider-xla-models"] if "provider-xla" in installed else []
    others = [distribution(n, "*.whl") for n in beside if n not in NEEDS[package]]
    testkit = distribution("jaxtap-testkit", "*.whl")
    install(*needed[:-1], f"{needed[-1]}[test]", *others, testkit)
    (tests,) = (tmp_path / "source").glob("*/tests")
    collect = [python, "-m", "pytest", "--collect-only", "-q", "--full", "--assert=plain", tests]
    collected = run(*collect, cwd=tmp_path)
    assert re.search(r"^\d+ tests collected", collected, re.MULTILINE), collected
    # What functions import when they run is not imported by collecting them.
    run(python, "-c", IMPORTS, tests, cwd=tmp_path)


@pytest.mark.slow
@pytest.mark.skipif("te-ffi-kernels" not in NEEDS, reason="there is no compiler")
def test_all_from_a_folder_of_wheels(distribution, python, tmp_path):
    """Installed as from an index, outside of the checkout: the command, and its main job."""
    wheels = [distribution(name, "*.whl") for name in [*NEEDS, "jaxtap"]]
    (tmp_path / "wheels").mkdir()
    for wheel in wheels:
        shutil.copy(wheel, tmp_path / "wheels")
    options = ["--exact", "--python", python, "--find-links", tmp_path / "wheels"]
    run(UV, "pip", "install", *options, "jaxtap[kernels,llm,xla]", cwd=tmp_path)
    said = run(python.with_name("jaxtap"), "demo", cwd=tmp_path)
    assert re.search(r"^w4a8 +[\d,]+ +9\d\.\d+%", said, re.MULTILINE), said
    assert "te_ffi_kernels.gemm_w8a8" in said
    said = run(
        python.with_name("jaxtap"), "llm", "demo", "--seconds", "2", "--windows", "8", cwd=tmp_path
    )
    assert re.search(r"^int4, Hadamard and GPTQ +[\d.]+ ", said, re.MULTILINE), said
    doctor = run(python.with_name("jaxtap"), "doctor", cwd=tmp_path)
    assert "0 fail" in doctor


@pytest.mark.slow
def test_an_sdist_of_the_cuda_kernels_has_all_sources(distribution):
    """Those that CMake names or a source includes, and no copy stays in the checkout."""
    with tarfile.open(distribution("te-ffi-kernels-cuda13", "*.tar.gz")) as sdist:
        files = {one.name.partition("/")[2]: sdist.extractfile(one).read() for one in sdist}
    shared = {name.removeprefix("shared/") for name in files if name.startswith("shared/")}
    ours = {name.removeprefix("csrc/") for name in files if name.startswith("csrc/")}
    cmake = files["CMakeLists.txt"].decode()
    assert {"common/packed.cc", "ffi/stages.cc"} <= shared
    assert {*re.findall(r'"\$\{SHARED_CSRC\}/([\w/.]+)"', cmake)} <= shared
    code = [file for name, file in files.items() if re.search(r"\.(h|cc|cu|inl)$", name)]
    included = {one for file in code for one in re.findall(rb'#include "([^"]+)"', file)}
    known = {"xla/ffi/api/c_api.h", "xla/ffi/api/ffi.h"}  # of jaxlib
    assert {name.decode() for name in included} - ours - shared <= known
    wheel = distribution("te-ffi-kernels-cuda13", "*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert not (PACKAGES / "te-ffi-kernels-cuda13" / "shared").exists()
