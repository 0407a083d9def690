"""Softmax: numbers, against NumPy in float64, and errors beside those of plain JAX."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.te import softmax as expected
from te_ffi_kernels import SoftmaxFusionType, reference

pytestmark = pytest.mark.sample(2)

SCALED, MASKED, CAUSAL = SoftmaxFusionType
FLOATS = [jnp.float32, jnp.bfloat16, jnp.float16]


# Batch, heads, q, k; each with one mask, or one for each of the batch.
CASES = [
    (jnp.float32, (2, 3, 5, 1)),
    (jnp.float32, (4, 1, 17, 33)),
    (jnp.bfloat16, (1, 2, 3, 600)),
    (jnp.float16, (3, 2, 65, 16)),
    (jnp.bfloat16, (2, 1, 3, 47)),
    (jnp.float16, (2, 1, 4, 0)),
]


def problem(fusion, dtype, shape, number):
    """Logits, a mask, a scale and a cotangent; new ones in each run."""
    rng = np.random.default_rng()
    x = rng.normal(size=shape) * (0.01, 1, 30)[number % 3]
    mask = rng.integers(0, 3, (1 if number % 2 else shape[0], 1, *shape[2:])).astype(np.uint8)
    mask[:, :, :1] = 1  # nothing is left of the first row
    x, dz = (jnp.asarray(one, dtype) for one in (x, rng.normal(size=shape)))
    return x, mask if fusion is MASKED else None, (1.0, 0.125, -0.7)[number % 3], dz


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


@pytest.mark.sample(1)
@pytest.mark.parametrize("number", range(len(CASES)))
@pytest.mark.parametrize("fusion", list(SoftmaxFusionType))
def test_against_float64_plain_jax_and_the_reference(fusion, number):
    dtype, shape = CASES[number]
    x, mask, scale, dz = problem(fusion, dtype, shape, number)
    out_of = left_out(fusion, mask, x.shape)

    @jax.jit
    def all_of_them(x, mask, dz):
        ops = (
            lambda x: te.softmax(x, mask, scale, fusion),
            lambda x: plain(fusion, x, mask, scale),
            lambda x: reference.softmax(x, mask, scale, fusion),
        )
        values, pulls = zip(*(jax.vjp(op, x) for op in ops), strict=True)
        return values, tuple(pull(dz)[0] for pull in pulls)

    given = None if mask is None else jnp.asarray(mask)
    values = expected.softmax(x, scale, out_of)
    gradient = expected.gradient(x, scale, dz, out_of)
    # The gradient is made of the result as it was stored; XLA may have it in float32 still.
    terms = abs(scale) * np.abs(np.asarray(dz, np.float64)).max(initial=0)
    for results, wanted, size in zip(
        all_of_them(x, given, dz), (values, gradient), (1, terms), strict=True
    ):
        found, other, same = results
        for one in (found, same):
            assert (one.shape, one.dtype) == (x.shape, x.dtype)
        # A rounding of the result beside what plain JAX is off by.
        step = float(jnp.finfo(dtype).eps)
        size = max(size * np.abs(values).max(initial=0), 1e-3)
        most = 1.1 * expected.worst(other, wanted) + step / 2 * size
        assert expected.worst(found, wanted) <= most
        assert expected.worst(same, wanted) <= most
        if out_of is not None:
            gone = np.broadcast_to(out_of, x.shape)
            assert not np.asarray(found, np.float32)[gone].any()
            assert not np.asarray(same, np.float32)[gone].any()


@pytest.mark.parametrize("dtype", FLOATS)
def test_small_numbers_are_not_lost(dtype):
    x = np.random.default_rng().normal(size=(4, 77)) * 3
    x = jnp.asarray(x, dtype)
    wanted = expected.softmax(x, 1.0)
    error = np.abs(np.asarray(te.softmax(x), np.float64) - wanted)
    relative = float(jnp.finfo(dtype).eps) / 2 + 2e-6
    assert (error <= relative * wanted + float(jnp.finfo(dtype).smallest_subnormal)).all()


@pytest.mark.sample(1)
@pytest.mark.parametrize("module", [te, reference])
def test_functions_of_the_primitives(module):
    rng = np.random.default_rng()
    x, dz = (jnp.asarray(rng.normal(size=(2, 3, 9, 9)), jnp.float16) for _ in range(2))
    mask = jnp.asarray(rng.integers(0, 2, (2, 1, 9, 9)), jnp.uint8)

    @jax.jit
    def pairs(x, dz, mask):
        found = []
        y = module.scaled_softmax_fwd(x, 0.5)
        found += [(y, te.softmax(x, None, 0.5))]
        slope = jax.vjp(lambda x: te.softmax(x, None, 0.5), x)[1](dz)[0]
        found += [(module.scaled_softmax_bwd(dz, y, x, 0.5), slope)]
        y = module.scaled_masked_softmax_fwd(x, mask, 0.5)
        found += [(y, te.softmax(x, mask, 0.5, MASKED))]
        found += [(y, te.softmax(x, mask == 1, 0.5, "scaled_masked"))]
        slope = jax.vjp(lambda x: te.softmax(x, mask, 0.5, MASKED), x)[1](dz)[0]
        found += [(module.scaled_masked_softmax_bwd(dz, y, None, None, 0.5), slope)]
        y = module.scaled_upper_triang_masked_softmax_fwd(x, 0.5)
        found += [(y, te.softmax(x, None, 0.5, CAUSAL))]
        slope = jax.vjp(lambda x: te.softmax(x, None, 0.5, CAUSAL), x)[1](dz)[0]
        found += [(module.scaled_upper_triang_masked_softmax_bwd(dz, y, x, 0.5), slope)]
        return found

    for one, other in pairs(x, dz, mask):
        near(one, other)


def near(one, other):
    step = 4 * float(jnp.finfo(one.dtype).eps)
    one, other = np.asarray(one, np.float32), np.asarray(other, np.float32)
    np.testing.assert_allclose(one, other, rtol=step, atol=step)


@pytest.mark.slow
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


def test_nothing_beyond_the_diagonal_is_looked_at():
    x = np.random.default_rng().normal(size=(20, 30)).astype(np.float32)
    dirty = jnp.asarray(np.where(expected.beyond_diagonal(20, 30), np.float32(np.nan), x))
    found = te.scaled_upper_triang_masked_softmax_fwd(dirty, 2.0)
    np.testing.assert_array_equal(found, te.scaled_upper_triang_masked_softmax_fwd(x, 2.0))
    found = te.scaled_upper_triang_masked_softmax_bwd(dirty, dirty, None, 2.0)
    wanted = te.scaled_upper_triang_masked_softmax_bwd(x, x, None, 2.0)
    np.testing.assert_array_equal(found, wanted)
    near(reference.scaled_upper_triang_masked_softmax_bwd(dirty, dirty, None, 2.0), wanted)


def test_rows_of_any_length_sum_to_one():
    for k in (20000, 70001):
        x = jnp.asarray(np.random.default_rng(1).normal(size=(3, k)) * 5, jnp.float32)
        y = np.asarray(te.softmax(x), np.float64)
        np.testing.assert_allclose(y.sum(1), 1, rtol=1e-6)
        wanted = expected.softmax(x, 1.0)
        np.testing.assert_allclose(y, wanted, rtol=4e-6)  # x - max is rounded


@pytest.mark.slow
def test_it_is_the_kernel_that_runs():
    x = jnp.ones((2, 2, 8, 8))
    mask = jnp.zeros((1, 1, 8, 8), jnp.uint8)
    for fusion in SoftmaxFusionType:

        def loss(x, fusion=fusion):
            return te.softmax(x, mask, 2.0, fusion)[..., 0].sum()

        text = jax.jit(jax.grad(loss)).lower(x).compile().as_text()
        for direction in ("forward", "backward"):
            assert f'"te_ffi_kernels.{fusion.value}_softmax_{direction}"' in text
