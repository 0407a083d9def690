"""Moments in 8 bits, compared with float64 NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import quant_optim as qo
from quant_optim.moments import noise_of

SHAPES = [(300,), (3, 700), (5, 2, 256), (40, 3), (3, 3, 8, 64), (1, 1), ()]


def numbers(shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.standard_normal(shape) * 10.0 ** rng.uniform(-4, 2, shape)


def blocks_of(x, block):
    """Yield the places of each block: along the last axis, or the longest if that is short."""
    if x.ndim == 0:
        yield ()
        return
    axis = x.ndim - 1
    if x.shape[axis] < 64:
        longest = max(x.shape)
        axis = max(i for i, size in enumerate(x.shape) if size == longest)
    for start in range(0, x.shape[axis], block):
        yield (slice(None),) * axis + (slice(start, start + block),)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_first_moment_is_off_by_less_than_a_level(shape):
    x = numbers(shape)
    noise = np.random.default_rng(1).uniform(size=shape)
    found = qo.restored(qo.first_moment(jnp.asarray(x, jnp.float32), jnp.asarray(noise), 256), 256)
    assert found.shape == shape
    assert found.dtype == jnp.float32
    for place in blocks_of(x, 256):
        axis = None if not place else len(place) - 1
        own, other = x[place], np.asarray(found, np.float64)[place]
        most = np.abs(own).max(axis, keepdims=axis is not None)
        level = np.sqrt(np.abs(own) / most) * 127
        step = (2 * np.floor(level) + 1) / 127**2 * most
        assert (np.abs(own - other) <= step * 1.01).all()
        assert (np.sign(other) * np.sign(own) >= 0).all()
        assert np.allclose(np.abs(other).max(axis, keepdims=axis is not None), most, rtol=1e-6)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_second_moment_is_off_by_less_than_a_point(shape):
    x = numbers(shape) ** 2
    noise = np.random.default_rng(1).uniform(size=shape)
    found = qo.restored(qo.second_moment(jnp.asarray(x, jnp.float32), jnp.asarray(noise), 256), 256)
    found = np.asarray(found, np.float64)
    for place in blocks_of(x, 256):
        axis = None if not place else len(place) - 1
        own, other = x[place], found[place]
        most = own.max(axis, keepdims=axis is not None)
        inside = own > most * 2.0**-31
        assert (np.abs(other / own - 1)[inside] < 1 / 8 + 1e-4).all()
        assert (other[~inside] > 0).all()
        assert (other[~inside] <= (most * 2.0**-30.9 + own)[~inside]).all()


@pytest.mark.parametrize("which", [qo.first_moment, qo.second_moment])
def test_rounding_keeps_means(which):
    x = np.abs(numbers((2, 64)))
    tries = 4000
    noise = np.random.default_rng(2).uniform(size=(tries, *x.shape)).astype(np.float32)
    given = jnp.broadcast_to(jnp.asarray(x, jnp.float32), noise.shape)
    found = qo.restored(jax.vmap(lambda x, n: which(x, n, 64))(given, noise), 64)
    found = np.asarray(found, np.float64)
    inside = x > x.max(-1, keepdims=True) * (0 if which is qo.first_moment else 2.0**-31)
    error = found.mean(0) - x
    sigma = found.std(0) / np.sqrt(tries) + 1e-6 * x
    assert (np.abs(error)[inside] < 5 * sigma[inside]).all()


@pytest.mark.parametrize("which", [qo.first_moment, qo.second_moment])
def test_what_is_stored_is_stored_again_as_it_is(which):
    x = jnp.asarray(np.abs(numbers((4, 512))), jnp.float32)
    once = which(x, jnp.zeros(x.shape), 128)
    for noise in (2**-17, 0.5, 1 - 2**-17):
        again = which(qo.restored(once, 128), jnp.full(x.shape, noise), 128)
        np.testing.assert_array_equal(again.values, once.values)
        np.testing.assert_allclose(again.scales, once.scales, rtol=1e-6)


def test_zeros_stay_and_blocks_are_apart():
    x = np.zeros((2, 512), np.float32)
    x[1, 300] = 7.0
    for which, most in ((qo.first_moment, 7.0), (qo.second_moment, 7.0)):
        found = np.asarray(qo.restored(which(jnp.asarray(x), jnp.zeros(x.shape), 256), 256))
        assert np.count_nonzero(found) == 1
        assert abs(found[1, 300] / most - 1) < 0.13


def test_values_that_are_not_finite_are_not_lost():
    x = np.ones((1, 512), np.float32)
    x[0, 3], x[0, 300] = np.nan, 2.0
    found = np.asarray(qo.restored(qo.first_moment(jnp.asarray(x), jnp.zeros(x.shape), 256), 256))
    assert np.isnan(found[0, :256]).all()
    assert np.isfinite(found[0, 256:]).all()


def test_noise_is_uniform_and_differs():
    a, b = map(np.asarray, noise_of((64, 1024), jnp.int32(3), 0))
    for x in (a, b):
        assert x.min() >= 0
        assert x.max() < 1
        counts, _ = np.histogram(x, 64, (0, 1))
        chi = ((counts - counts.mean()) ** 2 / counts.mean()).sum()
        assert chi < 120  # 63 degrees of freedom
    others = [noise_of((64, 1024), jnp.int32(4), 0)[0], noise_of((64, 1024), jnp.int32(3), 1)[0]]
    for x, y in [(a, b), *((a, np.asarray(one)) for one in others), (a[:, 1:], a[:, :-1])]:
        assert abs(np.corrcoef(x.ravel(), y.ravel())[0, 1]) < 0.02
