import jax
import jax.numpy as jnp
import numpy as np
import pytest

from quant_numerics import dequantize, dot_general, quantize_for_dot, straight_through

MATMUL = (((1,), (0,)), ((), ()))


def float_dot(x, w):
    return jax.lax.dot_general(x, w, MATMUL)


def quantized_dot(x, w):
    return dot_general(quantize_for_dot(x, (1,), "int8"), quantize_for_dot(w, (0,), "int8"), MATMUL)


dot = straight_through(quantized_dot, float_dot)


@pytest.fixture
def operands():
    rng = np.random.default_rng(0)
    return tuple(jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 4), (4, 5)))


def test_the_value_is_the_quantized_one(operands):
    out = jax.jit(dot)(*operands)
    np.testing.assert_array_equal(out, jax.jit(quantized_dot)(*operands))
    assert not jnp.array_equal(out, float_dot(*operands))


def weighted(fn):
    """A loss whose cotangent is not constant."""
    weights = jnp.arange(15, dtype=jnp.float32).reshape(3, 5)
    return lambda x, w: jnp.sum(fn(x, w) * weights)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit, jax.checkpoint], ids=["", "jit", "remat"])
def test_the_gradient_is_the_float_one(operands, wrap):
    ours = jax.jit(jax.grad(weighted(wrap(dot)), (0, 1)))(*operands)
    theirs = jax.jit(jax.grad(weighted(float_dot), (0, 1)))(*operands)
    jax.tree.map(np.testing.assert_array_equal, ours, theirs)


@pytest.mark.slow
def test_it_works_eagerly(operands):
    np.testing.assert_allclose(
        jax.grad(weighted(dot))(*operands), jax.grad(weighted(float_dot))(*operands), rtol=1e-6
    )


@pytest.mark.slow
def test_jvp(operands, leaks):
    tangents = tuple(jnp.full_like(a, 0.5) for a in operands)
    ours = leaks(lambda p, t: jax.jvp(dot, p, t))(operands, tangents)
    theirs = jax.jit(lambda p, t: jax.jvp(float_dot, p, t))(operands, tangents)
    np.testing.assert_array_equal(ours[0], jax.jit(quantized_dot)(*operands))
    np.testing.assert_array_equal(ours[1], theirs[1])


@pytest.mark.slow
def test_vmap_of_grad(operands, leaks):
    x, w = operands
    xs = jnp.stack([x, 2 * x])
    grads = [
        jit(jax.vmap(jax.grad(weighted(f), 1), (0, None)))(xs, w)
        for f, jit in ((dot, leaks), (float_dot, jax.jit))
    ]
    np.testing.assert_allclose(*grads, rtol=1e-6)


@pytest.mark.slow
def test_grad_through_scan_with_remat(operands, leaks):
    x, w = operands
    w = w @ w.T

    def loss(fn):
        def layer(x, _):
            return jax.checkpoint(fn)(x, w), None

        return lambda x: jnp.sum(jax.lax.scan(layer, x, length=2)[0])

    # Each layer is linear, so the gradient does not depend on where it is taken.
    grads = leaks(jax.grad(loss(dot)))(x), jax.jit(jax.grad(loss(float_dot)))(x)
    np.testing.assert_allclose(*grads, rtol=1e-5)


@pytest.mark.slow
def test_second_derivatives_are_straight_through_too(leaks):
    f = straight_through(lambda x: jnp.round(4 * jnp.tanh(x)) / 4, jnp.tanh)
    second = leaks(jax.grad(jax.grad(lambda x: f(x) ** 2)))(jnp.float32(0.3))
    t = np.tanh(0.3)
    slope, curvature = 1 - t**2, -2 * t * (1 - t**2)
    # (f²)'' = 2 f'² + 2 f f'': derivatives of tanh, with the rounded value 0.25 for f itself.
    np.testing.assert_allclose(second, 2 * slope**2 + 2 * 0.25 * curvature, rtol=1e-5)


def test_gradients_of_narrow_dtypes(operands):
    x, w = (a.astype(jnp.bfloat16) for a in operands)
    ours, theirs = (
        jax.jit(jax.grad(lambda x, f=f: f(x, w).astype(jnp.float32).sum()))(x)
        for f in (dot, float_dot)
    )
    assert ours.dtype == jnp.bfloat16
    np.testing.assert_array_equal(ours.astype(jnp.float32), theirs.astype(jnp.float32))


def test_integer_and_quantized_arguments_pass_through(operands):
    x, w = operands
    weight = jax.jit(lambda w: quantize_for_dot(w, (0,), "int8"))(w)

    def quantized(x, q, row):
        return dot_general(quantize_for_dot(x, (1,), "int8"), q, MATMUL)[row]

    def exact(x, q, row):
        return float_dot(x, dequantize(q))[row]

    f = straight_through(quantized, exact)
    row = jnp.int32(1)
    ours, theirs = (
        jax.jit(jax.grad(lambda x, g=g: g(x, weight, row).sum()))(x) for g in (f, exact)
    )
    np.testing.assert_allclose(ours, theirs, rtol=1e-6)


def test_outputs_that_differ_are_named(operands):
    f = straight_through(quantized_dot, lambda x, w: float_dot(x, w).astype(jnp.bfloat16))
    with pytest.raises(ValueError, match=r"float32\[3, 5\].*bfloat16\[3, 5\].*preferred_element"):
        jax.eval_shape(jax.grad(weighted(f)), *operands)
