import jax
import jax.numpy as jnp
import numpy as np
import pytest

from interception_core import kernel_platforms, platform_of
from interception_core.testing import installed_plugins


class Device:
    """A GPU, as JAX's devices are asked what they are."""

    platform = "gpu"


class Array:
    def __init__(self, *devices):
        self.devices = lambda: set(devices)


def test_arrays_and_devices_tell_theirs():
    here = jax.devices()[0]
    for where in (None, here, jnp.zeros(3), np.zeros(3), jax.ShapeDtypeStruct((3,), jnp.int32)):
        assert platform_of(where) == here.platform
    found = []
    jax.make_jaxpr(lambda x: (found.append(platform_of(x)), x)[1])(1)
    assert found == [here.platform]
    assert platform_of("tpu") == "tpu"


@pytest.mark.parametrize("name", ["cuda", "rocm"])
def test_a_gpu_is_what_programs_for_it_are_lowered_for(monkeypatch, name):
    gpu = Device()

    def devices(platform=None):
        if platform not in (None, name):
            raise RuntimeError(f"no {platform}")
        return [gpu]

    monkeypatch.setattr(jax, "devices", devices)
    monkeypatch.setattr(jax, "Device", Device)
    assert platform_of(gpu) == platform_of("gpu") == platform_of(Array(gpu)) == name
    assert platform_of() == name


def test_platforms_are_those_of_declared_kernels():
    every = {"te-ffi-kernels", "te-ffi-kernels-cuda13"}
    with installed_plugins("jaxtap_testkit.fake_cuda", without=every):
        assert kernel_platforms() == ("cuda",)
        if jax.devices()[0].platform != "gpu":
            assert platform_of("gpu") == "cuda"
    with installed_plugins(without=every):
        assert kernel_platforms() == ()
