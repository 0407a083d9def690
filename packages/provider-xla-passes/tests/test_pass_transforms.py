"""What passes do to activations and parameters leaves their contraction what it is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.linalg
from hypothesis import given
from hypothesis import strategies as st

import quant_numerics as qn
from jaxtap_testkit import examples
from jaxtap_testkit.coded import followed
from provider_xla import TransformedWeight
from provider_xla_passes.transformed import Rotated, Scaled, hadamard
from quant_numerics import Matmul


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


@pytest.mark.sample(2)
@pytest.mark.parametrize(("block", "k"), [(1, 3), (2, 6), (8, 8), (64, 192), (256, 512)])
def test_hadamard_is_sylvesters(block, k):
    x = normal(0, 3, k)
    blocks = np.kron(np.eye(k // block), scipy.linalg.hadamard(block) / np.sqrt(block))
    found = jax.jit(lambda x: hadamard(x, block))(x)
    np.testing.assert_allclose(found, x @ blocks, atol=1e-5)


@pytest.mark.slow
def test_a_large_hadamard_is_its_own_inverse():
    x = normal(0, 2, 4096)
    turned = hadamard(jnp.asarray(x), 2048)
    np.testing.assert_allclose(hadamard(turned, 2048), x, atol=2e-5)
    assert np.abs(turned - x).max() > 1


@st.composite
def steps(draw, k, lead=()):
    def one():
        rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
        if draw(st.booleans()):
            return Scaled(jnp.asarray(np.exp2(rng.normal(size=(*lead, k))), jnp.float32))
        block = draw(st.sampled_from([b for b in (1, 2, 4, 8, 16) if k % b == 0]))
        return Rotated(jnp.asarray(rng.choice([-1, 1], (*lead, k)), jnp.int8), block)

    return tuple(one() for _ in range(draw(st.integers(1, 3))))


@pytest.mark.slow
@examples(10)
@given(data=st.data(), k=st.sampled_from([1, 3, 4, 12, 16]), seed=st.integers(0, 2**32 - 1))
def test_the_contraction_is_unchanged(data, k, seed):
    x, w = normal(seed, 5, k), normal(seed + 1, k, 4)
    y, v = jnp.asarray(x), jnp.asarray(w)
    used = data.draw(steps(k))
    for step in used:
        y, v = step.forward(y), step.weight(v)
    np.testing.assert_allclose(y @ v, x.astype(np.float64) @ w, atol=1e-3, rtol=1e-3)
    for step in reversed(used):
        v = step.back(v)
    np.testing.assert_allclose(v, w, atol=1e-4, rtol=1e-4)


def held(shape, k_axes, used, qtype="int16"):
    """A transformed weight in so many bits that rounding is not seen, and its float array."""
    w = normal(3, *shape)
    order = [*k_axes, *(a for a in range(len(shape)) if a not in k_axes)]
    flat = jnp.asarray(w.transpose(order).reshape(used_k(shape, k_axes), -1))
    for step in used:
        flat = step.weight(flat)
    moved = flat.reshape([shape[a] for a in order])
    inner = moved.transpose([order.index(a) for a in range(len(shape))])
    q = qn.quantize(inner, qtype, channel_axes=range(len(shape)))
    return TransformedWeight(q, used, tuple(a - len(shape) for a in k_axes)), w


def used_k(shape, k_axes):
    return int(np.prod([shape[a] for a in k_axes]))


@pytest.mark.slow
@examples(5)
@given(data=st.data())
def test_several_contracted_axes_in_any_place(data):
    shape, k_axes = (4, 3, 2), data.draw(st.sampled_from([(0, 2), (1,), (0, 1), (2,), (0, 1, 2)]))
    weight, w = held(shape, k_axes, data.draw(steps(used_k(shape, k_axes))))
    np.testing.assert_allclose(weight.restore(), w, atol=1e-3)
    pairs = data.draw(st.permutations(k_axes))
    places = data.draw(st.permutations(range(len(k_axes) + 1)))
    sizes = [5 if p == len(k_axes) else shape[k_axes[p]] for p in places]
    x = normal(5, *sizes)
    x_axes = [places.index(k_axes.index(axis)) for axis in pairs]
    dims = ((tuple(x_axes), tuple(pairs)), ((), ()))
    contraction = Matmul(dims)
    turned = weight.activation(contraction, 1, jnp.asarray(x))
    assert turned.shape == x.shape
    expected = np.tensordot(x.astype(np.float64), w, (x_axes, pairs))
    actual = np.tensordot(turned, qn.dequantize(weight.inner), (x_axes, pairs))
    np.testing.assert_allclose(actual, expected, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "move",
    [
        lambda w: w.T,
        lambda w: w.astype(jnp.bfloat16).T,
        lambda w: jnp.moveaxis(w, 0, 1),
        jnp.copy,
        jax.lax.stop_gradient,
    ],
)
def test_moves_that_it_follows(move):
    used = (Rotated(jnp.asarray([1, -1, 1, 1, -1, 1, -1, -1], jnp.int8), 4),)
    weight, w = held((8, 3), (0,), used)
    moved = followed(move, weight)
    assert isinstance(moved, TransformedWeight)
    atol = 0.02 if moved.dtype == jnp.bfloat16 else 1e-3
    assert moved.dtype == move(w).dtype
    np.testing.assert_allclose(moved.restore().astype(np.float32), move(w), atol=atol)


@pytest.mark.sample(2)
@pytest.mark.parametrize("move", [lambda w: w.reshape(4, 6), lambda w: w[::-1], lambda w: w[2:]])
def test_moves_within_channels_are_not_followed(move):
    weight, _ = held((8, 3), (0,), (Scaled(jnp.arange(1.0, 9.0)),))
    assert "after the first 0" in followed(move, weight)
