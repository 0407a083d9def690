"""``Backward(None)``: float gradients at quantized values; and operands that come quantized."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quant_numerics as qn
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.qarray_samples import train_conv

INT8 = qn.HowToQuantize("int8")
FLOAT = qn.Backward(None)


def dims():
    return ((1,), (0,)), ((), ())


def conv(lhs, rhs, op=lax.conv_general_dilated, **options):
    options |= {"window_strides": (1, 1), "padding": "SAME"}
    return op(lhs, rhs, dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


SIZES = np.array([3, 5], np.int32)
# By name: the op that trains, the float op, the shapes of both operands, the shape of the result,
# and the axes of each operand that share a scale.
OPS = {
    "dot": (
        qn.Matmul(dims()).train,
        lambda x, w: lax.dot_general(x, w, dims()),
        ((8, 16), (16, 4)),
        (8, 4),
        ((1,), (0,)),
    ),
    "convolution": (
        functools.partial(conv, op=train_conv),
        conv,
        ((2, 5, 5, 3), (3, 3, 3, 4)),
        (2, 5, 5, 4),
        ((1, 2, 3), (0, 1, 2)),
    ),
    "ragged dot": (
        lambda x, w, **o: qn.RaggedMatmul().train(x, w, SIZES, **o),
        lambda x, w: lax.ragged_dot(x, w, SIZES),
        ((8, 16), (2, 16, 4)),
        (8, 4),
        ((1,), (1,)),
    ),
}


def rounded(x, axes):
    scale = np.abs(x).max(axes, keepdims=True) / np.float32(127)
    return np.rint(x / scale).astype(np.float32) * scale


@pytest.mark.parametrize("name", OPS)
def test_float_gradients_at_quantized_values(name):
    trained, plain, shapes, out, axes = OPS[name]
    x, w = (np.asarray(normal(*shape, seed=i)) for i, shape in enumerate(shapes))
    g = np.asarray(normal(*out, seed=9))

    @jax.jit
    def both(x, w, near_x, near_w, g):
        found = functools.partial(trained, lhs_how=INT8, rhs_how=INT8, backward=(FLOAT, None))
        y, pull = jax.vjp(found, x, w)
        _, at_both = jax.vjp(plain, near_x, near_w)
        _, at_floats = jax.vjp(plain, x, w)
        # The gradient of x is that at the rounded w. That of w, without a Backward, is at x.
        return y, pull(g), plain(near_x, near_w), (at_both(g)[0], at_floats(g)[1])

    y, grads, wanted, wanted_grads = both(x, w, *map(rounded, (x, w), axes), g)
    for ours, theirs in zip((y, *grads), (wanted, *wanted_grads), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-4)


def test_an_operand_that_comes_quantized():
    """Its quantized values count, whatever the float operand holds."""
    x, w, other = normal(8, 16), normal(16, 4, seed=1), normal(16, 4, seed=2)
    quantized = qn.quantize_for_dot(other, (0,), "int8")
    run = functools.partial(qn.Matmul(dims()).train, rhs_how=INT8)
    y, pull = jax.vjp(
        lambda x, w: run(x, w, lhs_how=None, backward=FLOAT, rhs_quantized=quantized), x, w
    )
    near = np.asarray(qn.dequantize(quantized))
    np.testing.assert_allclose(y, x @ near, rtol=1e-4, atol=1e-4)
    dx, dw = pull(jnp.ones_like(y))
    np.testing.assert_allclose(dx, np.ones((8, 4)) @ near.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(dw, np.asarray(x).T @ np.ones((8, 4)), rtol=1e-4, atol=1e-4)


def test_options_without_a_format_are_refused():
    for options in ({"tile_size": 4}, {"channelwise": False}, {"residual": "original"}):
        with pytest.raises(ValueError, match="without a qtype must have no other options"):
            qn.Backward(None, **options)
    with pytest.raises(ValueError, match="must quantize a gradient"):
        qn.Matmul(dims()).train(
            normal(8, 16), normal(16, 4), lhs_how=INT8, rhs_how=INT8, backward=FLOAT,
            cotangent_calibration=qn.Calibration(None, jnp.ones(())),
        )  # fmt: skip
