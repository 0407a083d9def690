"""Formats of 4 bits with a table run in te-ffi-kernels: float4, mxfp4, nvfp4, iq4_nl and nf4."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quant_numerics as qn
from jaxtap_testkit import huggingface_samples as samples
from jaxtap_testkit.numbers import normal
from provider_xla import PrepackedWeight, PtqProvider, QuantizationRule, load_huggingface, rules_of

RULES = {
    "nf4": QuantizationRule(weight_qtype="nf4", tile_size=64),
    "nf4 by channel": QuantizationRule(weight_qtype="nf4"),
    "mxfp4": QuantizationRule(weight_qtype="mxfp4"),
    "nvfp4": QuantizationRule(weight_qtype="nvfp4"),
    "float4": QuantizationRule(weight_qtype="float4_e2m1fn", tile_size=32),
    "float4 by channel": QuantizationRule(weight_qtype="float4_e2m1fn"),
    "iq4_nl": QuantizationRule(weight_qtype="iq4_nl", tile_size=32, scale_dtype="float16"),
}
SLACK = 2e-4
"""Numbers of nf4 have 16 bits in kernels, and activations beside nf4 and nvfp4 have 15."""


def model(p, x):
    """Two layers in a loop, a head, and lookups in its table."""
    x, _ = lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p["layers"])
    return x @ p["head"].T


def parameters(count=2, d=128, n=80):
    layers = normal(count, d, d, seed=1) / 11 * jnp.array([1.0, 40.0])[:, None, None]
    return {"layers": layers, "head": normal(n, d, seed=2) / 11}


def is_stored(node):
    return qn.is_form(node)


def bits(array):
    return np.asarray(array).view(np.uint8) if array.dtype.itemsize == 1 else np.asarray(array)


@pytest.mark.sample(3)
@pytest.mark.parametrize("name", RULES)
def test_plans_choose_kernels(name):
    params, x = parameters(), normal(3, 128)
    plan = PtqProvider(RULES[name]).plan(model, params, x)
    assert [op.kernel for op in plan.ops] == ["te_ffi_kernels.gemm_w4a16"] * 2, str(plan)
    packed, held = plan.quantize(params), plan.quantize(params, prepack=False)
    run = jax.jit(plan.apply(model))
    found, expected = run(packed, x), run(held, x)
    assert float(jnp.abs(found - expected).max()) <= SLACK * float(jnp.abs(expected).max())
    leaves = (jax.tree.leaves(tree, is_leaf=is_stored) for tree in (packed, held))
    for leaf, q in zip(*leaves, strict=True):
        assert isinstance(leaf, PrepackedWeight)
        assert leaf.scale_shape == q.scale_shape
        # Files have what was quantized, bit for bit.
        back = leaf.portable(q.scale_shape)
        for one, other in zip(*map(jax.tree.leaves, (back, q)), strict=True):
            assert (one.shape, one.dtype) == (other.shape, other.dtype)
            np.testing.assert_array_equal(bits(one), bits(other))


def test_int8_activations():
    params, x = parameters(), normal(40, 128)
    for qtype, tile in (("mxfp4", None), ("nf4", 64), ("iq4_nl", 32)):
        rule = QuantizationRule(weight_qtype=qtype, tile_size=tile, act_qtype="int8")
        if tile is None:
            rule = QuantizationRule(weight_qtype=qtype, act_qtype="int8", tile_size=32)
        plan = PtqProvider(rule).plan(model, params, x)
        assert [op.kernel for op in plan.ops] == ["te_ffi_kernels.gemm_w4a8"] * 2, str(plan)
        run = jax.jit(plan.apply(model))
        found = run(plan.quantize(params), x)
        expected = run(plan.quantize(params, prepack=False), x)
        assert np.linalg.norm(found - expected) <= 0.02 * np.linalg.norm(expected)


def test_lookups_and_a_tied_head():
    def tied(p, ids):
        return jnp.take(p, ids, axis=0) @ p.T

    table, ids = normal(96, 128), jnp.array([5, 0, 95])
    plan = PtqProvider(RULES["mxfp4"]).plan(tied, table, ids)
    assert {op.kernel for op in plan.ops} == {
        "te_ffi_kernels.packed_take",
        "te_ffi_kernels.gemm_w4a16",
    }, str(plan)
    run = jax.jit(plan.apply(tied))
    found, expected = run(plan.quantize(table), ids), run(plan.quantize(table, prepack=False), ids)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_convolutions_stay_in_xla_and_say_why():
    def convolve(w, x):
        numbers = ("NHWC", "HWIO", "NHWC")
        return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=numbers)

    w, x = normal(3, 3, 32, 64), normal(1, 8, 8, 32)
    rule = QuantizationRule(weight_qtype="iq4_nl", act_qtype="int8")
    (op,) = PtqProvider(rule).plan(convolve, w, x).ops
    assert op.kernel is None
    assert "convolution" in op.kernel_reason or "its package" in op.kernel_reason


@pytest.mark.parametrize("name", ["mxfp4", "nf4"])
def test_files_of_others_reach_kernels(tmp_path, name):
    written = {"mxfp4": samples.mxfp4, "nf4": samples.bitsandbytes}[name]()
    written.folder(tmp_path / "in", "a")
    (q,) = load_huggingface(tmp_path / "in", dtype="float32").values()

    def run(w, x):
        return jnp.einsum("bk,...nk->...bn", x, w)

    x = normal(2, q.shape[-1])
    plan = PtqProvider(rules_of(q)).plan(run, jax.ShapeDtypeStruct(q.shape, q.dtype), x)
    assert [op.kernel for op in plan.ops] == ["te_ffi_kernels.gemm_w4a16"], str(plan)
    stored = plan.prepack(q)
    assert isinstance(stored, PrepackedWeight)
    exact = np.einsum("bk,...nk->...bn", np.asarray(x, np.float64), written.numbers)
    found = jax.jit(plan.apply(run))(stored, x)
    assert np.linalg.norm(found - exact) <= 1e-4 * np.linalg.norm(exact)
