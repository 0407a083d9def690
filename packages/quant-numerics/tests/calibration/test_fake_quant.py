import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quant_numerics import (
    QTYPES,
    StochasticRounding,
    calibrate,
    dequantize,
    fake_quant,
    quantize,
)

pytestmark = pytest.mark.sample(2)


def sample(seed=0, shape=(4, 64)):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def options(qtype):
    block = QTYPES[qtype].block
    return {"channel_axes": (0,), "tile_axes": {1: block or 16}}


@pytest.mark.slow
@pytest.mark.parametrize("qtype", QTYPES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_it_is_dequantize_of_quantize(qtype, dtype):
    x = jnp.asarray(sample()).astype(dtype)
    fake = jax.jit(lambda x: fake_quant(x, qtype, **options(qtype)))(x)
    real = jax.jit(lambda x: dequantize(quantize(x, qtype, **options(qtype))))(x)
    assert fake.dtype == dtype
    np.testing.assert_array_equal(fake, real)


@pytest.mark.parametrize("qtype", QTYPES)
def test_the_gradient_goes_straight_through(qtype):
    x, weights = sample(), sample(1)
    loss = lambda x: (fake_quant(x, qtype, **options(qtype)) * weights).sum()  # noqa: E731
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(x), weights)
    with_nan = x.copy()
    with_nan[0, 0] = np.nan
    np.testing.assert_array_equal(jax.jit(jax.grad(loss))(with_nan), weights)


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", ["absmax,0.5", "minmax,0.5", "rms,1", "fixed,-0.5,1", "percentile,80", "mse,4"]
)
def test_the_gradient_is_zero_where_the_method_cuts_off(method):
    x = sample()
    kwargs = {"channel_axes": (0,), "tile_axes": {1: 16}, "method": method}
    fn = functools.partial(fake_quant, qtype="int4", **kwargs)
    grad = jax.jit(jax.grad(lambda x: fn(x).sum()))(x)
    lower, upper = calibrate(x, "int4", **kwargs)
    upper = np.repeat(upper, 16, 1)
    lower = -upper if lower is None else np.repeat(lower, 16, 1)
    inside = (x >= lower) & (x <= upper)
    np.testing.assert_array_equal(grad, inside.astype(np.float32))
    assert method == "mse,4" or 0 < inside.mean() < 1


@pytest.mark.slow
def test_forward_and_reverse_mode_agree_in_every_order():
    x = sample(shape=(3, 4))

    def f(x):
        return (fake_quant(x, "int8", method="absmax,0.7") ** 3).sum()

    y = np.asarray(fake_quant(x, "int8", method="absmax,0.7"))
    inside = np.abs(x) <= np.float32(0.7) * np.abs(x).max()
    np.testing.assert_allclose(jax.grad(f)(x), 3 * y**2 * inside, rtol=1e-6)
    tangent = sample(1, (3, 4))
    _, out = jax.jvp(f, (x,), (tangent,))
    np.testing.assert_allclose(out, (3 * y**2 * inside * tangent).sum(), rtol=1e-5)
    _, second = jax.jvp(jax.grad(f), (x,), (tangent,))
    np.testing.assert_allclose(second, 6 * y * inside * tangent, rtol=1e-5)


@pytest.mark.slow
def test_transformations():
    x = sample()
    fn = functools.partial(fake_quant, qtype="int8", channel_axes=(), method="absmax,0.8")
    mapped = jax.jit(jax.vmap(fn))(x)
    rows = fake_quant(x, "int8", channel_axes=(0,), method="absmax,0.8")
    np.testing.assert_array_equal(mapped, rows)
    _, scanned = jax.jit(lambda x: jax.lax.scan(lambda c, r: (c, fn(r)), 0, x))(x)
    np.testing.assert_array_equal(scanned, rows)
    per_row = jax.jit(jax.vmap(jax.grad(lambda r: fn(r).sum())))(x)
    np.testing.assert_array_equal(
        jax.grad(lambda x: jax.checkpoint(jax.vmap(fn))(x).sum())(x), per_row
    )


@pytest.mark.slow
def test_stochastic_rounding_in_a_gradient():
    x = sample()

    @jax.jit
    @jax.value_and_grad
    def loss(x, key):
        return fake_quant(x, "int4", rounding=StochasticRounding(key, "uniform", (0, 1))).sum()

    a, grad = loss(x, jax.random.key(0))
    b, _ = loss(x, jax.random.key(1))
    assert a != b
    np.testing.assert_array_equal(grad, np.ones_like(x))
    keys = jax.random.split(jax.random.key(0), 3)
    values, _ = jax.vmap(loss, (None, 0))(x, keys)
    assert len(set(values.tolist())) == 3


def test_only_floats():
    with pytest.raises(TypeError, match="the array to quantize must have"):
        fake_quant(jnp.ones(3, jnp.int32), "int8")
