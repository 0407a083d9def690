"""Softmax: numbers, against NumPy in float64, and errors beside those of plain JAX."""

import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import te_ffi_kernels as te
from te_ffi_kernels import SoftmaxFusionType, reference

sys.path.insert(0, str(Path(__file__).parent))

import softmax_expected as expected

SCALED, MASKED, CAUSAL = SoftmaxFusionType
FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]


@st.composite
def problems(draw):
    fusion = draw(st.sampled_from(list(SoftmaxFusionType)))
    sizes = st.sampled_from([0, 1, 2, 3, 15, 16, 17, 33, 64, 130, 600])
    batch, heads = draw(st.sampled_from([(1, 1), (2, 3), (4, 1), (3, 2)]))
    shape = (batch, heads, draw(sizes.filter(lambda n: n < 100)), draw(sizes))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.normal(size=shape) * draw(st.sampled_from([0.01, 1, 30]))
    dtype = draw(st.sampled_from(FLOATS))
    mask = None
    if fusion is MASKED:
        mask = rng.integers(0, 3, (draw(st.sampled_from([1, batch])), 1, *shape[2:]))
        mask = mask.astype(np.uint8)
        mask[:, :, :1] = 1  # nothing is left of the first row
    dz = rng.normal(size=shape)
    scale = draw(st.sampled_from([1.0, 0.125, -0.7]))
    return fusion, jnp.asarray(x, dtype), mask, scale, jnp.asarray(dz, dtype)


def left_out(fusion, mask, shape):
    if fusion is MASKED:
        return mask == 1
    return expected.beyond_diagonal(*shape[2:]) if fusion is CAUSAL else None


def plain(fusion, x, mask, scale):
    """As a program in JAX has it, in its own dtype."""
    scaled = x * jnp.asarray(scale, x.dtype)
    if fusion is SCALED:
        return jax.nn.softmax(scaled)
    where = mask != 1 if fusion is MASKED else ~expected.beyond_diagonal(*x.shape[2:])
    return jax.nn.softmax(scaled, where=jnp.broadcast_to(where, x.shape))


def value_and_gradient(fn, x, dz):
    out, pull = jax.vjp(fn, x)
    return out, pull(dz)[0]


@settings(deadline=None, max_examples=60)
@given(problems())
def test_against_float64_and_plain_jax(problem):
    fusion, x, mask, scale, dz = problem
    out_of = left_out(fusion, mask, x.shape)
    wanted = expected.softmax(x, scale, out_of)
    slope = expected.gradient(x, scale, dz, out_of)
    given_mask = None if mask is None else jnp.asarray(mask)

    def op(x):
        return te.softmax(x, given_mask, scale, fusion)

    found, found_slope = value_and_gradient(op, x, dz)
    other, other_slope = value_and_gradient(lambda x: plain(fusion, x, mask, scale), x, dz)
    assert (found.shape, found.dtype) == (x.shape, x.dtype)
    assert (found_slope.shape, found_slope.dtype) == (x.shape, x.dtype)
    # A rounding of the result beside what plain JAX is off by.
    step = float(jnp.finfo(x.dtype).eps)
    assert expected.worst(found, wanted) <= 1.1 * expected.worst(other, wanted) + step / 2
    most = np.abs(np.asarray(dz, np.float64)).max(initial=1)
    worst = 1.1 * expected.worst(other_slope, slope) + step * most
    assert expected.worst(found_slope, slope) <= worst
    # Relative errors, too: small numbers aren't lost.
    tiny = float(jnp.finfo(x.dtype).tiny)
    error = np.abs(np.asarray(found, np.float64) - wanted)
    assert (error <= (step + 4e-5) * wanted + tiny).all()
    if out_of is not None:
        gone = np.broadcast_to(out_of, x.shape)
        assert not np.asarray(found, np.float32)[gone].any()
        assert not np.asarray(found_slope, np.float32)[gone].any()


@settings(deadline=None, max_examples=40)
@given(problems())
def test_against_the_reference(problem):
    fusion, x, mask, scale, dz = problem
    given_mask = None if mask is None else jnp.asarray(mask)
    step = float(jnp.finfo(x.dtype).eps)
    found = value_and_gradient(lambda x: te.softmax(x, given_mask, scale, fusion), x, dz)
    wanted = value_and_gradient(lambda x: reference.softmax(x, given_mask, scale, fusion), x, dz)
    for one, other in zip(found, wanted, strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
        np.testing.assert_allclose(one, other, rtol=4 * step, atol=4 * step)


@pytest.mark.parametrize("dtype", FLOATS)
def test_functions_of_the_primitives(dtype):
    keys = jax.random.split(jax.random.key(0), 3)
    x, dz = (jax.random.normal(key, (2, 3, 9, 9), dtype) for key in keys[:2])
    mask = jax.random.bernoulli(keys[2], 0.4, (2, 1, 9, 9)).astype(jnp.uint8)
    for module in (te, reference):
        y = module.scaled_softmax_fwd(x, 0.5)
        np.testing.assert_array_equal(y, module.softmax(x, None, 0.5))
        found = module.scaled_softmax_bwd(dz, y, x, 0.5)
        slope = jax.vjp(lambda x: te.softmax(x, None, 0.5), x)[1](dz)[0]
        near(found, slope)
        y = module.scaled_masked_softmax_fwd(x, mask, 0.5)
        np.testing.assert_array_equal(y, module.softmax(x, mask, 0.5, MASKED))
        np.testing.assert_array_equal(y, module.softmax(x, mask == 1, 0.5, "scaled_masked"))
        found = module.scaled_masked_softmax_bwd(dz, y, None, None, 0.5)
        slope = jax.vjp(lambda x: te.softmax(x, mask, 0.5, MASKED), x)[1](dz)[0]
        near(found, slope)
        y = module.scaled_upper_triang_masked_softmax_fwd(x, 0.5)
        np.testing.assert_array_equal(y, module.softmax(x, None, 0.5, CAUSAL))
        found = module.scaled_upper_triang_masked_softmax_bwd(dz, y, x, 0.5)
        slope = jax.vjp(lambda x: te.softmax(x, None, 0.5, CAUSAL), x)[1](dz)[0]
        near(found, slope)


def near(one, other):
    step = 4 * float(jnp.finfo(one.dtype).eps)
    one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
    np.testing.assert_allclose(one, other, rtol=step, atol=step)


@pytest.mark.parametrize("module", [te, reference])
def test_what_is_not_finite(module):
    inf, nan = jnp.inf, jnp.nan
    x = jnp.asarray([[0.0, -inf, 1.0], [-inf, -inf, -inf], [inf, 0.0, 0.0], [nan, 0.0, 0.0]])
    found = module.softmax(x)
    np.testing.assert_allclose(found[0], [1 / (1 + np.e), 0, np.e / (1 + np.e)], rtol=1e-6)
    assert np.isnan(found[1:]).all()
    mask = jnp.asarray([[0, 0, 1], [0, 0, 1], [1, 0, 0], [1, 0, 0]], jnp.uint8)[None, None]
    found = module.softmax(x[None, None], mask, 1.0, MASKED)[0, 0]
    np.testing.assert_array_equal(found[0], [1, 0, 0])
    np.testing.assert_array_equal(found[1], [nan, nan, 0])
    np.testing.assert_array_equal(found[2:], [[0, 0.5, 0.5]] * 2)


@pytest.mark.parametrize("dtype", FLOATS)
def test_nothing_beyond_the_diagonal_is_looked_at(dtype):
    gone = expected.beyond_diagonal(20, 30)
    x = jax.random.normal(jax.random.key(0), (20, 30), dtype)
    dirty = jnp.where(gone, jnp.asarray(jnp.nan, dtype), x)
    found = te.scaled_upper_triang_masked_softmax_fwd(dirty, 2.0)
    np.testing.assert_array_equal(found, te.scaled_upper_triang_masked_softmax_fwd(x, 2.0))
    found = te.scaled_upper_triang_masked_softmax_bwd(dirty, dirty, None, 2.0)
    wanted = te.scaled_upper_triang_masked_softmax_bwd(x, x, None, 2.0)
    np.testing.assert_array_equal(found, wanted)
    near(reference.scaled_upper_triang_masked_softmax_bwd(dirty, dirty, None, 2.0), wanted)


def test_rows_of_any_length_sum_to_one():
    for k in (20000, 70001):
        x = jax.random.normal(jax.random.key(1), (3, k)) * 5
        y = np.asarray(te.softmax(x), np.float64)
        np.testing.assert_allclose(y.sum(1), 1, rtol=1e-5)
        assert expected.worst(y, expected.softmax(x, 1.0)) < 1e-6


def test_it_is_the_kernel_that_runs():
    x = jnp.ones((2, 2, 8, 8))
    mask = jnp.zeros((1, 1, 8, 8), jnp.uint8)
    for fusion in SoftmaxFusionType:
        loss = lambda x, fusion=fusion: te.softmax(x, mask, 2.0, fusion)[..., 0].sum()
        text = jax.jit(jax.grad(loss)).lower(x).compile().as_text()
        for direction in ("forward", "backward"):
            assert f'"te_ffi_kernels.{fusion.value}_softmax_{direction}"' in text
