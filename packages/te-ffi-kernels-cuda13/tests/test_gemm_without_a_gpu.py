"""gemm_v2 on any machine: which calls its kernel takes, and how much memory that asks for."""

import importlib.util
import itertools
import re

import jax
import jax.numpy as jnp
import pytest

import te_ffi_kernels as te
from interception_core._kernels.call import kernel_call
from te_ffi_kernels import _op
from te_ffi_kernels._te import workspace
from te_ffi_kernels._te.gemm_config import Attributes, GemmConfig
from te_ffi_kernels._te.modes import ScalingMode
from te_ffi_kernels._te.sides import Side
from te_ffi_kernels_cuda13 import _cublas, _cudnn, _library, _supports

BUILT = importlib.util.find_spec("te_ffi_kernels_cuda13._native") is not None
needs_native = pytest.mark.skipif(not BUILT, reason="built without nvcc")
FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
SIZES = [(1, 1, 32), (16, 24, 64), (5, 16, 96), (130, 70, 160)]


def call(lhs=(4, 32), rhs=(8, 32), dtype="float32", mode=0):
    shapes = (jax.ShapeDtypeStruct(shape, jnp.dtype(dtype)) for shape in (lhs, rhs))
    lhs, rhs = shapes
    none = jax.ShapeDtypeStruct((0,), jnp.float32)
    config = Attributes({"scaling_mode": mode})
    return kernel_call("gemm_v2", "cuda", (lhs, none, rhs, none), {"config": config})


@pytest.mark.parametrize(
    ("capability", "given", "part"),
    [
        (0, {}, "no NVIDIA GPU"),
        (80, {}, True),
        (80, {"dtype": "int8", "mode": 64}, True),
        (80, {"dtype": "float8_e4m3fn", "mode": 1}, "capability 8.9, and one here has 8.0"),
        (90, {"dtype": "float8_e5m2", "mode": 64}, True),
        (90, {"dtype": "float8_e4m3fn", "mode": 2}, "capability 10.0, and one here has 9.0"),
        (100, {"dtype": "float8_e4m3fn", "mode": 2}, True),
        (90, {"lhs": (0, 32)}, "empty"),
        (90, {"lhs": (4, 0), "rhs": (8, 0)}, "empty"),
    ],
)
def test_what_it_takes(monkeypatch, capability, given, part):
    monkeypatch.setattr(_supports, "compute_capability", lambda: capability)
    monkeypatch.setattr(_cublas, "missing", lambda: None)
    found = _supports.gemm_v2(call(**given))
    assert found is True if part is True else part in found
    if part is True:
        monkeypatch.setattr(_cublas, "missing", lambda: "cuBLASLt can't be loaded")
        assert "can't be loaded" in _supports.gemm_v2(call(**given))


@needs_native
@pytest.mark.parametrize(
    ("module", "package"), [(_cublas, "nvidia-cublas"), (_cudnn, "nvidia-cudnn-cu13")]
)
def test_a_library_that_is_not_there(monkeypatch, module, package):
    monkeypatch.setattr(_library, "installed", lambda package, name: [])
    monkeypatch.setattr(module, "_NAME", "no-such-library.so")
    monkeypatch.setattr(module, "loaded", module.loaded.__wrapped__)
    assert f"install {package} (no-such-library.so" in str(module.missing())


@needs_native
@pytest.mark.parametrize("mode", [m for m in ScalingMode if not m.name.startswith("NVFP4")])
def test_the_kernel_has_the_memory_that_it_asks_for(mode):
    native = importlib.import_module("te_ffi_kernels_cuda13._native")
    kinds = [*FLOATS] if mode is ScalingMode.NO_SCALING else [jnp.float8_e4m3fn]
    kinds += [] if mode.is_mx or mode is ScalingMode.NO_SCALING else [jnp.int8]
    flags = [(False, True)] * 4
    for kind, (m, n, k), out in itertools.product(kinds, SIZES, FLOATS):
        k += 0 if mode.is_mx else 3 * (m % 2)
        for first, other, bias, gelu in itertools.product(*flags):
            left = Side((m, k) if first else (k, m), 1, not first)
            right = Side((n, k) if other else (k, n), 1, not other)
            config = GemmConfig(jnp.dtype(out), mode, left, right, fuse_gelu=gelu)
            assert workspace.beside_cublaslt(config, kind, bias) == native.gemm_workspace(
                m, n, k, int(mode), kind == jnp.int8, first, other,
                FLOATS.index(kind) if kind in FLOATS else 0, FLOATS.index(out), bias, gelu,
            )  # fmt: skip


@pytest.fixture
def lowers_for_hopper(monkeypatch):
    """As if there were a GPU of compute capability 9.0, for programs that are only lowered."""
    monkeypatch.setattr(_op, "_has_backend", lambda platform: True)
    monkeypatch.setattr(_op, "register_kernel", lambda spec: spec.target)
    monkeypatch.setattr(_supports, "compute_capability", lambda: 90)
    monkeypatch.setattr(_cublas, "missing", lambda: None)


@needs_native
@pytest.mark.usefixtures("lowers_for_hopper")
def test_a_program_for_gpus_gives_it_memory():
    one, none = jnp.ones((1,)), jnp.zeros((0,))
    rest = (none, one, 0 * one, jnp.bfloat16, ((1,), (0,)), 64)

    def product(x, w, scales):
        return te.gemm_v2(x, scales, w, scales, *rest)

    codes = jax.ShapeDtypeStruct((64, 64), jnp.float8_e4m3fn)
    traced = jax.jit(product).trace(codes, codes, jax.ShapeDtypeStruct((64,), jnp.float32))
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = re.search(r"@te_ffi_kernels\.gemm_v2.*tensor<(\d+)xui8>", text)
    # rhs with its lanes first, and sums in float32.
    assert int(found[1]) == 256 + 64 * 64 + 4 * 64 * 64 + workspace.CUBLASLT


@needs_native
@pytest.mark.usefixtures("lowers_for_hopper")
@pytest.mark.filterwarnings("ignore:te_ffi_kernels.gemm is deprecated")
def test_the_deprecated_gemm_is_gemm_v2_with_epilogues():
    one, none = jnp.ones((1,)), jnp.zeros((0,))

    def product(x, w, before):
        rest = (jnp.bfloat16, ((1,), (0,)), 0, False, True, True)
        return te.gemm(x, none, w, none, none.astype(x.dtype), before, one, 0 * one, *rest)

    x = jax.ShapeDtypeStruct((48, 48), jnp.bfloat16)
    text = jax.jit(product).trace(x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert "@te_ffi_kernels.gemm_v2" in text
    assert "dot_general" not in text
