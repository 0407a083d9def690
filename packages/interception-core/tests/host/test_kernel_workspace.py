import sys
import types

import jax
import jax.numpy as jnp
import pytest

from interception_core import Aval, KernelCall, KernelSpec, PluginError, kernel_workspace

X = jax.ShapeDtypeStruct((4, 8), jnp.bfloat16)
Y = jax.ShapeDtypeStruct((4, 2), jnp.float32)


def spec(workspace):
    fields = {"handlers": "acme_kernels:handlers", "op": "gemm", "workspace": workspace}
    return KernelSpec("acme.gemm", "cuda", **fields)


@pytest.fixture
def returning(monkeypatch):
    """Makes a kernel whose workspace is a function."""

    def make(function):
        module = types.ModuleType("acme_kernels")
        module.memory = function
        monkeypatch.setitem(sys.modules, module.__name__, module)
        return spec("acme_kernels:memory")

    return make


def test_it_is_asked_with_the_call_and_its_results(returning):
    seen = []
    kernel = returning(lambda call, results: seen.append((call, results)) or 640)
    assert kernel_workspace(kernel, (X,), (Y,), group=32) == 640
    call = KernelCall("gemm", "cuda", (Aval((4, 8), "bfloat16"),), (("group", 32),))
    assert seen == [(call, (Aval((4, 2), "float32"),))]


@pytest.mark.parametrize("found", [None, 0])
def test_no_result_and_one_without_bytes(returning, found):
    assert kernel_workspace(returning(lambda call, results: found), (X,), (Y,)) is found


def test_a_kernel_without_one():
    assert kernel_workspace(spec(None), (X,), (Y,)) is None


@pytest.mark.parametrize("found", [-1, 1.5, True, "64"])
def test_what_is_no_number_of_bytes(returning, found):
    with pytest.raises(PluginError, match=r"'acme.gemm@cuda'.*must return bytes.*bfloat16\[4,8\]"):
        kernel_workspace(returning(lambda call, results: found), (X,), (Y,))


def test_one_that_fails(returning):
    def fails(call, results):
        raise KeyError("group")

    with pytest.raises(PluginError, match=r"'acme.gemm@cuda'.*failed for gemm.*KeyError") as raised:
        kernel_workspace(returning(fails), (X,), (Y,))
    assert isinstance(raised.value.__cause__, KeyError)


def test_one_that_is_not_there():
    with pytest.raises(PluginError, match="cannot load 'acme_nowhere:memory'"):
        kernel_workspace(spec("acme_nowhere:memory"), (X,), (Y,))
