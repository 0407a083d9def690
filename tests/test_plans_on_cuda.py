"""What plans choose for CUDA, and what is in the programs, on a machine without a GPU."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest

from interception_core.testing import installed_plugins
from provider_xla import PrepackedWeight, PtqProvider, QuantizationRule
from te_ffi_kernels import op as ops
from te_ffi_kernels.op import reference_ops
from te_ffi_kernels_cuda13 import _cublas, _cudnn, _gpus, _limits, _plugin

BUILT = importlib.util.find_spec("te_ffi_kernels_cuda13._native") is not None
K, N = 512, 96
W8 = QuantizationRule(weight_qtype="int8")
W4 = QuantizationRule(weight_qtype="int4", tile_size=32)
A8 = {"act_qtype": "int8"}
W8A8 = QuantizationRule(weight_qtype="int8", **A8)
W8A8_GROUPS = QuantizationRule(weight_qtype="int8", tile_size=64, **A8)
W4A8 = QuantizationRule(weight_qtype="int4", tile_size=32, **A8)
SMALL_GROUPS = QuantizationRule(weight_qtype="int4", tile_size=16)
ONE = "weights are packed for one row"
FEW = "weights are packed for up to 8 rows"
BOTH = f"{FEW} and 512 rows or more without groups"

CHOSEN = [
    (W8, 1, "float32", "gemm_w8a16"),
    (W8, 1, "bfloat16", "gemm_w8a16"),
    (W8, 2, "float16", f"it has 2 rows, and on GPUs {ONE}"),
    (W8, 4096, "bfloat16", ONE),
    (W4, 1, "bfloat16", "gemm_w4a16"),
    (W4, 8, "float32", "gemm_w4a16"),
    (W4, 9, "float32", FEW),
    (SMALL_GROUPS, 1, "float32", "groups of 16 rows, and not a multiple of 32"),
    (W8A8, 1, "bfloat16", "gemm_w8a8"),
    (W8A8, 9, "bfloat16", BOTH),
    (W8A8, 511, "bfloat16", BOTH),
    (W8A8, 512, "bfloat16", "gemm_w8a8"),
    (W8A8_GROUPS, 8, "bfloat16", "gemm_w8a8"),
    (W8A8_GROUPS, 2048, "bfloat16", BOTH),
    (W4A8, 8, "bfloat16", "gemm_w4a8"),
    (W4A8, 64, "bfloat16", FEW),
]
"""Rule, rows and dtype of the activation: the kernel, or a part of the reason for XLA."""


@pytest.fixture(autouse=True)
def cuda(own_programs, monkeypatch):
    """Kernels as they are declared where they are built, for one GPU of compute capability 9.0."""
    monkeypatch.setattr(_plugin, "built", lambda: True)
    monkeypatch.setattr(_gpus, "used", lambda: {0: 90})
    monkeypatch.setattr(_cublas, "missing", lambda: None)
    name = _plugin.__name__
    with installed_plugins(name, without={"te-ffi-kernels-cuda13"}):
        yield


def model(params, x):
    return x @ params["w"]


def planned(rule, rows, dtype):
    params = {"w": jnp.ones((K, N), dtype)}
    x = jax.ShapeDtypeStruct((rows, K), dtype)
    return PtqProvider(rule).plan(model, params, x), params, x


def test_plans_choose_what_the_table_says():
    for rule, rows, dtype, wanted in CHOSEN:
        plan, *_ = planned(rule, rows, dtype)
        (op,) = plan.ops
        kernel, reason, _ = op.kernels["cuda"]
        if wanted in _limits.WORTH:
            assert (kernel, reason) == (f"te_ffi_kernels.{wanted}", None), (rows, reason)
            assert f"{kernel} (cpu, cuda)" in str(plan)
        else:
            assert kernel is None
            assert wanted in reason
            assert "XLA (cuda)" in str(plan)
            assert "cuda" not in plan.weights["args[0]['w']"].packings


def test_no_gpu_that_is_too_old_gets_kernels(monkeypatch):
    monkeypatch.setattr(_gpus, "used", lambda: {0: 90, 1: 75})
    (op,) = planned(W8, 1, "float32")[0].ops
    assert op.kernels["cuda"].kernel is None
    assert "GPU 1 has 7.5; set CUDA_VISIBLE_DEVICES=0" in op.kernels["cuda"].reason
    assert op.kernels["cpu"].kernel == "te_ffi_kernels.gemm_w8a16"


def fused(params, x):
    h = jax.nn.softmax(x @ params["w"])
    q = h.reshape(1, 8, 3, 32)
    return jax.nn.dot_product_attention(q, q, q, is_causal=True)


def test_functions_in_one_pass(monkeypatch):
    monkeypatch.setattr(_cudnn, "missing", lambda: None)
    rules = [QuantizationRule(op_names=("softmax", "attention"), kernel="fused"), W8]
    attention = "te_ffi_kernels.fused_attn_forward"
    for dtype, gpus, wanted in (
        ("float32", {0: 90}, "cuDNN's attention is of bfloat16 or float16"),
        ("bfloat16", {}, "no NVIDIA GPU"),
        ("bfloat16", {0: 90}, attention),
    ):
        monkeypatch.setattr(_gpus, "used", lambda gpus=gpus: gpus)
        params = {"w": jnp.ones((K, N), dtype)}
        x = jax.ShapeDtypeStruct((8, K), dtype)
        # Kernels are chosen once per different call; without references, cuDNN would be asked.
        again = installed_plugins(_plugin.__name__, without={"te-ffi-kernels-cuda13"})
        with again, reference_ops():
            plan = PtqProvider(rules).plan(fused, params, x)
        found = {op.op_name: op.kernels["cuda"] for op in plan.ops if op.kernels}
        assert found["softmax"].kernel == "te_ffi_kernels.scaled_softmax_forward"
        kernel, reason, _ = found["attention"]
        assert kernel == wanted if wanted == attention else wanted in reason


@pytest.mark.skipif(not BUILT, reason="workspaces are asked of the compiled part")
def test_programs_for_gpus_have_the_kernels_of_the_plan(monkeypatch):
    monkeypatch.setattr(ops, "has_backend", lambda platform: platform == "cpu")
    for rule, rows, dtype, wanted in CHOSEN:
        plan, params, x = planned(rule, rows, dtype)
        stored = plan.convert(plan.quantize(params), "cuda")
        assert isinstance(stored["w"], PrepackedWeight) == (wanted in _limits.WORTH)
        traced = jax.jit(plan.apply(model)).trace(stored, x)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
        calls = re.findall(r"custom_call @(te_ffi_kernels\.\w+)", text)
        assert calls == ([f"te_ffi_kernels.{wanted}"] if wanted in _limits.WORTH else [])
        assert ("dot_general" in text) == (wanted not in _limits.WORTH)


@pytest.mark.skipif(not BUILT, reason="workspaces are asked of the compiled part")
def test_a_packed_weight_has_a_kernel_for_any_number_of_rows(monkeypatch):
    """A plan for one row packs it, and its program may be run with more."""
    monkeypatch.setattr(ops, "has_backend", lambda platform: platform == "cpu")
    for rule, op in ((W8, "gemm_w8a16"), (W4, "gemm_w4a16"), (W8A8, "gemm_w8a8")):
        plan, params, _ = planned(rule, 1, "bfloat16")
        stored = plan.convert(plan.quantize(params), "cuda")
        for rows in (9, 512):
            traced = jax.jit(plan.apply(model)).trace(stored, jnp.ones((rows, K), "bfloat16"))
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert f"@te_ffi_kernels.{op}" in text
            assert "dot_general" not in text


def layers(params, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params["layers"])[0]


def experts(params, x):
    sizes = (x[:4, 0] > 0).astype(jnp.int32)
    return jax.lax.ragged_dot(x, params["experts"], sizes)


@pytest.mark.skipif(not BUILT, reason="workspaces are asked of the compiled part")
def test_stacks_of_weights_are_not_copied_on_gpus(monkeypatch):
    """A scan over layers, and experts: kernels find the weights in the stack."""
    monkeypatch.setattr(ops, "has_backend", lambda platform: platform == "cpu")
    for rule, op in ((W8, "gemm_w8a16"), (W4, "gemm_w4a16"), (W8A8, "gemm_w8a8")):
        for fn, name, part in ((layers, "layers", "index"), (experts, "experts", "group_sizes")):
            params = {name: jnp.ones((4, K, K), "bfloat16")}
            x = jax.ShapeDtypeStruct((1 if fn is layers else 4, K), "bfloat16")
            plan = PtqProvider(rule).plan(fn, params, x)
            stored = plan.convert(plan.quantize(params), "cuda")
            traced = jax.jit(plan.apply(fn)).trace(stored, x)
            text = traced.lower(lowering_platforms=("cuda",)).as_text()
            assert re.search(rf"@te_ffi_kernels\.{op}\([^\n]*\b{part} = 1", text)
            assert not re.search(r"(slice|gather)[^\n]*xui8", text)
