"""Stacks of packed weights: a program that takes whole weights of one keeps them packed."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtap_testkit import fake_kernels
from jaxtap_testkit.fake_kernels import kernels  # noqa: F401
from jaxtap_testkit.xla_samples import draw
from provider_xla import PrepackedWeight, PtqProvider, QuantizationRule
from provider_xla.run.contraction import quantized_contraction

W8 = QuantizationRule(weight_qtype="int8")
PERM = np.array([2, 1, 0, 3])
MASK = np.array([True, False, True, True])

# Of a stack [4, K, N] or [2, 2, K, N], and an index: how the program takes a weight, and NumPy.
TAKEN = {
    "index": (lambda s, i: s[i], lambda s, i: s[i]),
    "take": (lambda s, i: jnp.take(s, i, axis=0), lambda s, i: s[i]),
    "take, clipped": (lambda s, i: jnp.take(s, i + 9, axis=0, mode="clip"), lambda s, i: s[3]),
    "take, wrapped": (lambda s, i: jnp.take(s, i + 4, axis=0, mode="wrap"), lambda s, i: s[i]),
    "take of some": (
        lambda s, i: jnp.take(s, jnp.stack([i, i + 1]), axis=0)[1],
        lambda s, i: s[i + 1],
    ),
    "take_along_axis": (
        lambda s, i: jnp.take_along_axis(s, jnp.full((1, 1, 1), i), axis=0)[0],
        lambda s, i: s[i],
    ),
    "at": (lambda s, i: s.at[i].get(mode="promise_in_bounds"), lambda s, i: s[i]),
    "permuted": (lambda s, i: s[PERM][i], lambda s, i: s[PERM][i]),
    "masked": (lambda s, i: s[MASK][i], lambda s, i: s[MASK][i]),
    "dynamic_slice": (lambda s, i: lax.dynamic_slice_in_dim(s, i, 2)[1], lambda s, i: s[i + 1]),
    "two axes": (
        lambda s, i: s[jnp.array([0, 1]), jnp.array([1, i])][1],
        lambda s, i: s[1, i],
    ),
}


def rounded(w):
    """Weights rounded to int8, a scale for each column, as float64."""
    w = np.asarray(w, np.float64)
    scale = np.abs(w).max(-2, keepdims=True) / 127
    return np.round(w / scale) * scale


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", TAKEN)
def test_whole_weights_of_a_stack_stay_packed(kernels, case):  # noqa: F811
    take, expected = TAKEN[case]
    lead = (2, 2) if case == "two axes" else (4,)
    stack, x = draw((*lead, 16, 8), (3, 16))

    def program(stack, x, i):
        return x @ take(stack, i)

    plan = PtqProvider(W8, strict=True).plan(program, stack, x, jnp.int32(1))
    (matmul,) = (op for op in plan.ops if op.op_name == "matmul")
    assert matmul.kernel is not None, matmul.kernel_reason
    stored = plan.quantize(stack)
    assert isinstance(stored, PrepackedWeight)
    quantized_contraction.clear_cache()
    fake_kernels.CALLS.clear()
    y = jax.jit(plan.apply(program))(stored, x, jnp.int32(1))
    assert len(fake_kernels.CALLS) == 1
    weight = expected(rounded(stack), 1)
    np.testing.assert_allclose(y, np.asarray(x, np.float64) @ weight, rtol=1e-4, atol=1e-4)


def test_weights_that_vmap_looks_up_are_not_packed_and_the_plan_says_so(kernels):  # noqa: F811
    stack, x = draw((4, 16, 8), (3, 16))

    def program(stack, x, ids):
        return jax.vmap(lambda i: x @ jnp.take(stack, i, axis=0))(ids)

    ids = jnp.array([3, 0])
    plan = PtqProvider(W8).plan(program, stack, x, ids)
    reasons = {op.op_name: op.kernel_reason for op in plan.ops}
    assert reasons["take"] == "a lookup in vmap"
    assert "a lookup in vmap" in reasons["matmul"]
    y = jax.jit(plan.apply(program))(plan.quantize(stack), x, ids)
    expected = np.asarray(x, np.float64) @ rounded(stack)[np.asarray(ids)]
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-4)


def test_rows_of_a_quantized_table_are_an_activation_of_a_kernel(kernels):  # noqa: F811
    table, w = draw((20, 16), (16, 8))
    rule = QuantizationRule(weight_qtype="int8", op_names=["take", "matmul"])
    ids = jnp.array([3, 0, 19])
    for look_up in (lambda t, i: t[i], lambda t, i: jnp.take(t, i, axis=0)):

        def program(params, ids, look_up=look_up):
            return look_up(params["table"], ids) @ params["w"]

        params = {"table": table, "w": w}
        plan = PtqProvider(rule, strict=True).plan(program, params, ids)
        stored = plan.quantize(params)
        assert isinstance(stored["w"], PrepackedWeight)
        quantized_contraction.clear_cache()
        fake_kernels.CALLS.clear()
        y = jax.jit(plan.apply(program))(stored, ids)
        assert len(fake_kernels.CALLS) == 1
        rows = rounded(np.asarray(table).T).T[np.asarray(ids)]
        np.testing.assert_allclose(y, rows @ rounded(w), rtol=1e-4, atol=1e-4)
