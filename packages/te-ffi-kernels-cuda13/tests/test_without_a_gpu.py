"""What there is of the package on any machine."""

import importlib.util
import sys
import types
from pathlib import Path

import pytest

import te_ffi_kernels_cuda13
from interception_core import Aval, KernelCall
from jaxtap_testkit.processes import run_python
from te_ffi_kernels_cuda13 import (
    _cublas,
    _cudnn,
    _doctor,
    _gemm,
    _gpus,
    _library,
    _plugin,
    _status,
    _supports,
)

BUILT = importlib.util.find_spec("te_ffi_kernels_cuda13._native") is not None


class Native:
    """A compiled part that says what it's told to."""

    CUDA_VERSION = 13000

    def __init__(self, driver, capabilities=()):
        self.driver, self.capabilities = driver, capabilities

    def compute_capabilities(self):
        return list(self.capabilities)

    def driver_version(self):
        return self.driver

    def refused_gemm(self, device, limit, fast, m, n, k, mode, lhs, rhs, *rest):
        return "no algorithm" if "float8_e5m2" in (lhs, rhs) else ""


def pretend(monkeypatch, driver=None, capabilities=(), **distributions):
    for module in (_status, _gpus):
        monkeypatch.setattr(module, "built", lambda: driver is not None)
        monkeypatch.setattr(module, "native", lambda: Native(driver, capabilities))
    monkeypatch.setattr(_gemm, "native", lambda: Native(driver, capabilities))
    _gemm._refused.cache_clear()
    monkeypatch.setattr(_plugin, "built", lambda: driver is not None)
    names = {name.replace("_", "-"): version for name, version in distributions.items()}
    monkeypatch.setattr(_doctor, "_installed", names.get)
    monkeypatch.setattr(_cublas, "loaded", lambda: (130100, ""))
    monkeypatch.setattr(_cudnn, "loaded", lambda: (91600, ""))


@pytest.fixture
def backend(monkeypatch, tmp_path):
    """The build backend, on one that asks for cmake and returns the settings that it gets.

    No GPU and no compiler are found by chance.
    """
    name = "scikit_build_core"
    stand_in, build = types.ModuleType(name), types.ModuleType(f"{name}.build")
    build.get_requires_for_build_wheel = lambda settings: ["cmake"]
    build.get_requires_for_build_editable = lambda settings: ["cmake"]
    build.build_wheel = lambda directory, settings, metadata: settings
    build.build_editable = lambda directory, settings, metadata: settings
    stand_in.build = build
    monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setitem(sys.modules, f"{name}.build", build)
    for variable in ("JAXTAP_CUDA", "CUDA_HOME", "CUDA_PATH", "CUDACXX"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "/bin")
    path = Path(__file__).parents[1] / "backend" / "with_cuda.py"
    spec = importlib.util.spec_from_file_location("with_cuda", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "dev").mkdir()
    # The driver of a container that was given no GPU.
    (tmp_path / "dev" / "nvidiactl").touch()
    monkeypatch.setattr(module, "DEVICES", tmp_path / "dev")
    monkeypatch.setattr(module, "DEFAULT_HOME", str(tmp_path / "no" / "cuda"))
    return module


def fake_nvcc(home, said="Cuda compilation tools, release 13.0, V13.0.88"):
    path = home / "bin" / "nvcc"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho '{said}'\n")
    path.chmod(0o755)
    return str(path)


@pytest.mark.parametrize("kind", ["wheel", "editable"])
@pytest.mark.parametrize(
    ("wanted", "gpu", "builds"),
    [
        (None, False, False),
        (None, True, True),
        ("AUTO", False, False),
        ("AUTO", True, True),
        ("ON", False, True),
        ("OFF", True, False),
    ],
)
def test_kernels_are_built_where_a_gpu_is_or_on_demand(
    monkeypatch, tmp_path, backend, kind, wanted, gpu, builds
):
    nvcc = fake_nvcc(tmp_path / "cuda")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    if wanted is not None:
        monkeypatch.setenv("JAXTAP_CUDA", wanted)
    if gpu:
        (tmp_path / "dev" / "nvidia1").touch()
    asked = getattr(backend, f"get_requires_for_build_{kind}")()
    assert asked[0] == "cmake"
    assert any("nvidia-cudnn-cu13" in one for one in asked) == builds
    # The build is told the same, beside what the caller has to say.
    told = getattr(backend, f"build_{kind}")("dist", {"cmake.verbose": "true"})
    assert told.pop("cmake.verbose") == "true"
    without = {"wheel.cmake": "false", "wheel.py-api": "py3"}
    assert told == ({"cmake.define.CMAKE_CUDA_COMPILER": nvcc} if builds else without)


@pytest.mark.parametrize("variable", ["CUDACXX", "PATH", "CUDA_HOME", "CUDA_PATH", None])
def test_where_nvcc_is_looked_for(monkeypatch, tmp_path, backend, variable):
    nvcc = fake_nvcc(tmp_path / "cuda")
    values = {"CUDACXX": nvcc, "PATH": str(tmp_path / "cuda" / "bin")}
    if variable is None:
        monkeypatch.setattr(backend, "DEFAULT_HOME", str(tmp_path / "cuda"))
    else:
        monkeypatch.setenv(variable, values.get(variable, str(tmp_path / "cuda")))
    monkeypatch.setenv("JAXTAP_CUDA", "ON")
    assert backend.compiler() == nvcc


@pytest.mark.parametrize(
    ("said", "got"),
    [
        (None, "got none"),
        ("release 12.8, V12.8.61", "got 12.8 at"),
        ("no compiler here", "got ? at"),
    ],
)
def test_builds_without_the_right_nvcc(monkeypatch, tmp_path, capsys, backend, said, got):
    if said is not None:
        fake_nvcc(tmp_path / "cuda", said)
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    # A machine with a GPU gets the Python part, and a message.
    (tmp_path / "dev" / "nvidia0").touch()
    assert backend.compiler() is None
    assert f"nvcc must be version 13, {got}" in capsys.readouterr().err
    monkeypatch.setenv("JAXTAP_CUDA", "ON")
    with pytest.raises(SystemExit, match=r"JAXTAP_CUDA is ON: nvcc must be version 13, got"):
        backend.compiler()


def test_jaxtap_cuda_has_three_values(monkeypatch, backend):
    monkeypatch.setenv("JAXTAP_CUDA", "yes")
    with pytest.raises(SystemExit, match="JAXTAP_CUDA must be AUTO, ON or OFF, got yes"):
        backend.compiler()


def test_importing_it_imports_no_jax():
    code = "import sys, te_ffi_kernels_cuda13._plugin; assert 'jax' not in sys.modules"
    run_python("-c", code)


@pytest.mark.parametrize(
    ("driver", "part"),
    [
        (None, "built without them"),
        (0, "no NVIDIA driver"),
        (12080, "a driver for 12.8, which can't run them"),
        (13020, "for CUDA 13.0, a driver for 13.2"),
    ],
)
def test_status(monkeypatch, driver, part):
    pretend(monkeypatch, driver)
    assert part in te_ffi_kernels_cuda13.status()


@pytest.mark.parametrize(
    ("driver", "installed", "statuses", "part"),
    [
        (None, {}, ["ok"], "no kernels"),
        (0, {}, ["ok", "ok"], "no CUDA plugin"),
        (0, {"jax_cuda13_plugin": "0.11.2", "jaxlib": "0.11.2"}, ["ok", "ok"], "is 0.11.2"),
        (0, {"jax_cuda13_plugin": "0.11.2", "jaxlib": "0.12.0"}, ["ok", "fail"], "is 0.11.2"),
        (
            12080,
            {"jax_cuda12_plugin": "0.11.2"},
            ["fail", "warn", "ok", "ok"],
            "jax-cuda12-plugin",
        ),
        (13020, {}, ["ok", "warn", "ok", "ok"], "no CUDA plugin"),
        (13020, {}, ["ok", "warn", "ok", "ok"], "cuBLASLt is 13.1.0"),
        (13020, {}, ["ok", "warn", "ok", "ok"], "cuDNN is 9.16.0"),
    ],
)
def test_doctor(monkeypatch, driver, installed, statuses, part):
    pretend(monkeypatch, driver, **installed)
    found = list(_doctor.cuda())
    assert [result.status for result in found] == statuses
    assert any(part in result.message for result in found)
    assert all(result.hint for result in found if result.status != "ok")


@pytest.mark.parametrize(
    ("module", "found", "message"),
    [
        (_cublas, (0, "no file"), "cuBLASLt can't be loaded; install nvidia-cublas (no file)"),
        (_cudnn, (0, "no file"), "cuDNN can't be loaded; install nvidia-cudnn-cu13 (no file)"),
        (_cudnn, (91200, ""), "cuDNN is 9.12.0, and attention needs 9.16.0"),
    ],
)
def test_doctor_of_a_driver_without_a_library(monkeypatch, module, found, message):
    pretend(monkeypatch, 13020)
    monkeypatch.setattr(module, "loaded", lambda: found)
    warned = [result for result in _doctor.cuda() if message in result.message]
    assert [result.status for result in warned] == ["warn"]
    assert warned[0].hint.startswith("install nvidia-")
    # A machine without a driver isn't asked for libraries.
    pretend(monkeypatch, 0)
    monkeypatch.setattr(module, "loaded", lambda: found)
    assert all(result.status == "ok" for result in _doctor.cuda())


def test_doctor_names_matmuls_that_cublaslt_refuses(monkeypatch):
    """Of those that the GPUs can have at all; such an op would run as plain JAX without a word."""
    said = "run as plain JAX: no algorithm"
    for capability, refused in ((80, 0), (90, 2)):
        pretend(monkeypatch, 13020, (capability,))
        warned = [result for result in _doctor.cuda() if said in result.message]
        assert len(warned) == refused
        assert all("float8_e5m2" in result.message and result.hint for result in warned)


@pytest.mark.parametrize(
    ("capabilities", "part"),
    [
        ((), None),
        ((80,), None),
        ((120, 90), None),
        ((75,), "the kernels need a GPU of compute capability 8.0 or newer, and GPU 0 has 7.5"),
        (
            (90, 75, 100),
            "and GPU 1 has 7.5; set CUDA_VISIBLE_DEVICES=0,2 to run them on the others",
        ),
    ],
)
def test_gpus_that_are_too_old_run_plain_jax(monkeypatch, capabilities, part):
    pretend(monkeypatch, 13020, capabilities)
    x = Aval((4, 64), "float32")
    calls = [
        (_supports.anything, KernelCall("act_lu", "cuda", (x,), ())),
        (_supports.packed_matmul, KernelCall("gemm_w8a16", "cuda", (x, Aval((64, 8), "int8")), ())),
    ]
    warned = [result for result in _doctor.cuda() if "capability" in result.message]
    for supports, call in calls:
        found = supports(call)
        assert found is True if part is None else part in found
    assert len(warned) == (part is not None)
    for result in warned:
        assert part in result.message
        assert "run as plain JAX" in result.message
        assert result.status == "warn"


def test_gpus_that_jax_does_not_use_do_not_count(monkeypatch):
    import jax

    used = [types.SimpleNamespace(local_hardware_id=number) for number in (0, 2)]
    pretend(monkeypatch, 13020, (90, 75, 100))
    monkeypatch.setattr(jax, "local_devices", lambda backend: used)
    assert _gpus.used() == {0: 90, 2: 100}
    assert _gpus.unfit(_gpus.OLDEST) is None


def test_where_libraries_are_looked_for(monkeypatch, tmp_path):
    (tmp_path / "some_library" / "lib").mkdir(parents=True)
    (tmp_path / "some_library" / "lib" / "libsome.so").touch()
    monkeypatch.syspath_prepend(tmp_path)
    tried = []

    def load(path):
        tried.append(path)
        return (0, f"not {path}") if len(tried) == 1 else (7, "")

    first = tmp_path / "some_library" / "lib" / "libsome.so"
    assert _library.load(load, "some_library", "libsome.so") == (7, "")
    assert tried == [str(first), "libsome.so"]
    assert _library.installed("some_library", "libother.so") == []
    assert _library.installed("no_library.at_all", "libsome.so") == []
    found = _library.load(lambda path: (0, f"not {path}"), "some_library", "libsome.so")
    assert found == (0, f"not {first}; not libsome.so")


def test_doctor_of_a_driver_without_devices(monkeypatch):
    import jax

    def devices(platform):
        raise RuntimeError("Unknown backend cuda\nand more")

    pretend(monkeypatch, 13020, jax_cuda13_plugin="0.11.2", jaxlib="0.11.2")
    monkeypatch.setattr(jax, "devices", devices)
    found = [result for result in _doctor.cuda() if result.status == "warn"]
    assert [result.message for result in found] == ["JAX finds no GPU: Unknown backend cuda"]


def test_kernels_are_declared_where_they_were_built(monkeypatch):
    pretend(monkeypatch)
    assert _plugin.jaxtap_register_kernels() == []
    pretend(monkeypatch, 13020)
    found = _plugin.jaxtap_register_kernels()
    assert {spec.op for spec in found} == set(_plugin.OPS)
    # The ops are those of te-ffi-kernels, whose targets they share; gemm_v2 is XLA's on CPU.
    from te_ffi_kernels._plugin import jaxtap_register_kernels as of_cpu

    on_cpu = {spec.op: spec.target for spec in of_cpu()}
    targets = {spec.op: spec.target for spec in found}
    assert targets.keys() - on_cpu.keys() == {"gemm_v2"}
    assert targets.items() <= (on_cpu | {"gemm_v2": "te_ffi_kernels.gemm_v2"}).items()


@pytest.mark.skipif(not BUILT, reason="built without the kernels")
def test_every_target_is_warmed_up():
    from te_ffi_kernels_cuda13 import _ffi, _native

    found = _ffi.registrations()
    assert set(found) == {f"te_ffi_kernels.{op}" for op in _plugin.OPS}
    planned_ops = _plugin._SIZED
    with_plans = {f"te_ffi_kernels.{op}" for op in planned_ops}
    for name, target in found.items():
        planned = {"prepare"} if name in with_plans else set()
        assert set(target.stages) == {"instantiate", "initialize", "execute"} | planned
        assert set(target.types) == {"te_ffi_kernels_cuda13.Site"}
    assert _native.CUDA_VERSION // 1000 == 13
    assert te_ffi_kernels_cuda13.warm_counts() == {} or _native.driver_version()
