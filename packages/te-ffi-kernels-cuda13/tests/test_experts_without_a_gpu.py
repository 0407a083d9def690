"""The kernels of a mixture of experts on any machine: what they take, and how they are lowered."""

import importlib
import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

import te_ffi_kernels as te
from interception_core import KernelCall
from te_ffi_kernels import op as ops
from te_ffi_kernels_cuda13 import _cublas, _gemm, _gpus, _supports, _workspace

BUILT = importlib.util.find_spec("te_ffi_kernels_cuda13._native") is not None
needs_native = pytest.mark.skipif(not BUILT, reason="built without nvcc")


def call(dtype="float32", mode=0, ragged=0, lhs=(40, 32), lhs_is_trans=None, rhs_is_trans=False):
    """Return a call of three groups."""
    shape = jax.ShapeDtypeStruct
    rows = ragged == 0
    none, numbers = shape((0,), jnp.float32), shape((3,), jnp.float32)
    rhs = (3, 16, 32) if rhs_is_trans else (3, 32, 16)
    sizes = shape((3,), jnp.int32)
    return KernelCall.of(
        "grouped_gemm_v2", "cuda",
        (shape(lhs, jnp.dtype(dtype)), none, shape(rhs if rows else (40, 16), jnp.dtype(dtype)),
         none, none, sizes, numbers, numbers),
        scaling_mode=mode, ragged=ragged, lhs_axis_boundary=1, rhs_axis_boundary=2 if rows else 1,
        lhs_is_trans=not rows if lhs_is_trans is None else lhs_is_trans, rhs_is_trans=rhs_is_trans,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("capability", "given", "part"),
    [
        (0, {}, "no NVIDIA GPU"),
        (80, {}, True),
        (80, {"ragged": 1}, True),
        (80, {"dtype": "int8", "mode": 64}, True),
        (80, {"dtype": "float8_e4m3fn", "mode": 1}, "capability 8.9 or newer, and GPU 0 has 8.0"),
        (90, {"dtype": "float8_e4m3fn", "mode": 2}, "capability 10.0 or newer, and GPU 0 has 9.0"),
        (75, {}, "the kernels need a GPU of compute capability 8.0 or newer, and GPU 0 has 7.5"),
        (90, {"lhs": (0, 32)}, "empty"),
        (90, {"dtype": "int8", "mode": 1, "ragged": 1}, True),
        (90, {"dtype": "int8", "mode": 1, "ragged": 1, "lhs_is_trans": False}, "their last axis"),
        (90, {"dtype": "int8", "mode": 1, "ragged": 1, "rhs_is_trans": True}, "their last axis"),
    ],
)
def test_which_groups_it_takes(monkeypatch, capability, given, part):
    monkeypatch.setattr(_gpus, "used", lambda: {0: capability} if capability else {})
    monkeypatch.setattr(_cublas, "missing", lambda: None)
    monkeypatch.setattr(_gemm, "refused_group", lambda call: None)
    found = _supports.grouped_gemm_v2(call(**given))
    assert found is True if part is True else part in found
    if part is True:
        monkeypatch.setattr(_cublas, "missing", lambda: "cuBLASLt can't be loaded")
        assert "can't be loaded" in _supports.grouped_gemm_v2(call(**given))


def test_cublaslt_is_asked_about_a_small_group_and_about_all(monkeypatch):
    asked = []

    class Native:
        def refused_gemm(self, device, limit, fast, *matmul):
            asked.append(matmul)
            return ""

    monkeypatch.setattr(_gpus, "used", lambda: {0: 90})
    monkeypatch.setattr(_gemm, "native", Native)
    _gemm._refused.cache_clear()
    for given, sizes in (
        ({}, [(32, 16, 32), (40, 16, 32)]),
        ({"rhs_is_trans": True}, [(32, 16, 32), (40, 16, 32)]),
        ({"ragged": 1}, [(32, 16, 32), (32, 16, 40)]),
    ):
        asked.clear()
        assert _gemm.refused_group(call(**given)) is None
        assert [one[:3] for one in asked[::3]] == sizes
        assert {one[8] for one in asked} == {"float32", "bfloat16", "float16"}
    _gemm._refused.cache_clear()


@pytest.mark.parametrize(("k", "part"), [(1024, True), (1025, "at most 1024")])
def test_which_k_topk_takes(monkeypatch, k, part):
    monkeypatch.setattr(_gpus, "used", lambda: {})
    x = jax.ShapeDtypeStruct((2, 4096), jnp.float32)
    found = _supports.topk(KernelCall.of("topk", "cuda", (x,), k_value=k))
    assert found is True if part is True else part in found


@pytest.fixture
def lowers_for_hopper(monkeypatch):
    """As if there were a GPU of compute capability 9.0, for programs that are only lowered."""
    monkeypatch.setattr(ops, "has_backend", lambda platform: True)
    monkeypatch.setattr(ops, "register_kernel", lambda spec: spec.target)
    monkeypatch.setattr(_gpus, "used", lambda: {0: 90})
    monkeypatch.setattr(_cublas, "missing", lambda: None)
    monkeypatch.setattr(_gemm, "refused_group", lambda call: None)


@needs_native
@pytest.mark.usefixtures("lowers_for_hopper")
def test_a_layer_of_experts_lowered_for_gpus():
    def layer(x, router, up, down):
        probs, routed = te.fused_topk_with_score_function(x @ router, 2)
        rows, _, places, offsets, sizes = te.token_dispatch(x, routed, 128, align_size=16)
        made = te.grouped_dense(te.grouped_dense(rows, up, sizes), down, sizes)
        best = te.topk(probs, 2)[0].sum()
        return te.token_combine(made, places, probs, offsets).sum() + best

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)  # noqa: E731
    given = (shape(64, 32), shape(32, 4), shape(4, 32, 48), shape(4, 48, 32))
    traced = jax.jit(jax.grad(layer, range(4))).trace(*given)
    for platform in ("cpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        called = re.findall(r"@te_ffi_kernels\.(\w+)", text)
        assert called.count("grouped_gemm_v2") == 6
        assert {
            "make_row_id_map", "permute_with_mask_map", "unpermute_with_mask_map",
            "unpermute_bwd_with_merging_probs",
        } < set(called)  # fmt: skip
        assert ("topk" in called) == (platform == "cuda")  # on CPU XLA's is faster in float32
    pattern = r"@te_ffi_kernels\.grouped_gemm_v2.*tensor<(\d+)xui8>"
    found = {int(one) for one in re.findall(pattern, text)}
    assert all(one >= _workspace.PART + _workspace.CUBLASLT for one in found)


@needs_native
@pytest.mark.usefixtures("lowers_for_hopper")
def test_groups_have_the_memory_that_the_largest_could_need():
    none, ones = jnp.zeros(0), jnp.ones(4)

    def multiply(x, w, scales, sizes):
        given = (x, scales, w, scales, none, sizes, ones, 0 * ones)
        return te.grouped_gemm_v2(*given, jnp.bfloat16, ((1,), (1,)), 1)

    x = jax.ShapeDtypeStruct((40, 64), jnp.float8_e4m3fn)
    w = jax.ShapeDtypeStruct((4, 64, 48), jnp.float8_e4m3fn)
    sizes = jax.ShapeDtypeStruct((4,), jnp.int32)
    traced = jax.jit(multiply).trace(x, w, jax.ShapeDtypeStruct((4,), jnp.float32), sizes)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = int(re.search(r"@te_ffi_kernels\.grouped_gemm_v2.*tensor<(\d+)xui8>", text)[1])
    native = importlib.import_module("te_ffi_kernels_cuda13._native")
    matmul = (40, 48, 64, 1, x.dtype.name, x.dtype.name, True, False, "bfloat16", False, False)
    assert found == _workspace.PART + native.gemm_workspace(*matmul) + _workspace.CUBLASLT
