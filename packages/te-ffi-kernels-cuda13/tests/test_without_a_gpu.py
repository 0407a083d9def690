"""What there is of the package on any machine."""

import importlib.util
import subprocess
import sys

import pytest

import te_ffi_kernels_cuda13
from te_ffi_kernels_cuda13 import _doctor, _plugin, _status

BUILT = importlib.util.find_spec("te_ffi_kernels_cuda13._native") is not None


class Native:
    """A compiled part that says what it's told to."""

    CUDA_VERSION = 13000

    def __init__(self, driver):
        self.driver = driver

    def driver_version(self):
        return self.driver


def pretend(monkeypatch, driver=None, **distributions):
    monkeypatch.setattr(_status, "built", lambda: driver is not None)
    monkeypatch.setattr(_status, "native", lambda: Native(driver))
    monkeypatch.setattr(_plugin, "built", lambda: driver is not None)
    names = {name.replace("_", "-"): version for name, version in distributions.items()}
    monkeypatch.setattr(_doctor, "_installed", names.get)


def test_importing_it_imports_no_jax():
    code = "import sys, te_ffi_kernels_cuda13._plugin; assert 'jax' not in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)


@pytest.mark.parametrize(
    ("driver", "part"),
    [
        (None, "built without nvcc"),
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
        (12080, {"jax_cuda12_plugin": "0.11.2"}, ["fail", "warn"], "jax-cuda12-plugin"),
        (13020, {}, ["ok", "warn"], "no CUDA plugin"),
    ],
)
def test_doctor(monkeypatch, driver, installed, statuses, part):
    pretend(monkeypatch, driver, **installed)
    found = list(_doctor.cuda())
    assert [result.status for result in found] == statuses
    assert any(part in result.message for result in found)
    assert all(result.hint for result in found if result.status != "ok")


def test_doctor_of_a_driver_without_devices(monkeypatch):
    import jax

    def devices(platform):
        raise RuntimeError("Unknown backend cuda\nand more")

    pretend(monkeypatch, 13020, jax_cuda13_plugin="0.11.2", jaxlib="0.11.2")
    monkeypatch.setattr(jax, "devices", devices)
    last = list(_doctor.cuda())[-1]
    assert (last.status, last.message) == ("warn", "JAX finds no GPU: Unknown backend cuda")


def test_kernels_are_declared_where_they_were_built(monkeypatch):
    pretend(monkeypatch)
    assert _plugin.jaxtap_register_kernels() == []
    pretend(monkeypatch, 13020)
    found = _plugin.jaxtap_register_kernels()
    assert {spec.op for spec in found} == set(_plugin.OPS)
    # The ops are those of te-ffi-kernels, whose targets they share.
    from te_ffi_kernels._plugin import jaxtap_register_kernels as of_cpu

    on_cpu = {spec.op: spec.target for spec in of_cpu()}
    assert all(on_cpu[spec.op] == spec.target for spec in found)


@pytest.mark.skipif(not BUILT, reason="built without nvcc")
def test_every_target_is_warmed_up():
    from te_ffi_kernels_cuda13 import _ffi, _native

    found = _ffi.registrations()
    assert set(found) == {f"te_ffi_kernels.{op}" for op in _plugin.OPS}
    with_plans = {f"te_ffi_kernels.{op}" for op in ("gemm_v2", *_plugin._PRODUCTS)}
    for name, target in found.items():
        planned = {"prepare"} if name in with_plans else set()
        assert set(target.stages) == {"instantiate", "initialize", "execute"} | planned
        assert set(target.types) == {"te_ffi_kernels_cuda13.Site"}
    assert _native.CUDA_VERSION // 1000 == 13
    assert te_ffi_kernels_cuda13.warm_counts() == {} or _native.driver_version()
