"""Convolutions for training: gradients against lax in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxtap_testkit.qarray_samples import CONVOLUTIONS, normal, train_conv
from quant_numerics import (
    Backward,
    Calibration,
    HowToQuantize,
    conv_general_dilated,
    quantize,
)

pytestmark = pytest.mark.sample(2)

INT8 = HowToQuantize("int8")


def problem(name):
    shape_l, shape_r, args, options = CONVOLUTIONS[name]
    x, w = normal(*shape_l), normal(*shape_r, seed=1)
    exact = functools.partial(lax.conv_general_dilated, window_strides=args[0], padding=args[1],
                              **dict(zip(("lhs_dilation", "rhs_dilation"), args[2:], strict=False)),
                              **options)  # fmt: skip
    g = normal(*jax.eval_shape(exact, x, w).shape, seed=2)
    train = functools.partial(train_conv, **exact.keywords, lhs_how=INT8, rhs_how=INT8)
    return x, w, g, exact, train


def grads(fn, *args, jit=jax.jit):
    def run(*args):
        *operands, g = args
        out, pull = jax.vjp(fn, *operands)
        return out, *pull(g)

    return jit(run)(*args)


def float64_grads(fn, *args):
    with jax.enable_x64(True):
        return grads(fn, *(np.asarray(a, np.float64) for a in args))


def relative(ours, want):
    ours, want = np.asarray(ours).astype(np.float64), np.asarray(want)
    return np.linalg.norm(ours - want) / np.linalg.norm(want)


@pytest.mark.slow
@pytest.mark.parametrize("backward", [None, Backward("int8")], ids=["float", "int8"])
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_gradients_of_all_kinds_of_convolutions(name, backward):
    x, w, g, exact, train = problem(name)
    out, gx, gw = grads(functools.partial(train, backward=backward), x, w, g)
    _, want_x, want_w = float64_grads(exact, x, w, g)
    near = 1e-6 if backward is None else 0.03
    assert relative(gx, want_x) < near
    assert relative(gw, want_w) < near

    options = exact.keywords
    dn = lax.conv_dimension_numbers(x.shape, w.shape, options.get("dimension_numbers"))

    def ptq(x, w):
        lhs = quantize(x, "int8", channel_axes=dn.lhs_spec[:1])
        rhs = quantize(w, "int8", channel_axes=dn.rhs_spec[:1])
        return conv_general_dilated(lhs, rhs, **options)

    np.testing.assert_array_equal(out, jax.jit(ptq)(x, w))


def test_gradients_without_examples():
    x, w = jnp.ones((0, 5, 5, 3)), jnp.ones((3, 3, 3, 4))
    how = HowToQuantize("int8")

    def loss(x, w):
        options = {"dimension_numbers": ("NHWC", "HWIO", "NHWC"), "lhs_how": how, "rhs_how": how}
        options |= {"window_strides": (1, 1), "padding": "SAME", "backward": Backward("int8")}
        return train_conv(x, w, **options).sum()

    gx, gw = jax.jit(jax.grad(loss, (0, 1)))(x, w)
    assert gx.shape == x.shape
    np.testing.assert_array_equal(gw, np.zeros(w.shape))


@pytest.mark.slow
def test_gradients_are_products_of_qvalue():
    x, w, g, exact, train = problem("nhwc same")
    _, gx, gw = grads(functools.partial(train, backward=Backward("int8")), x, w, g)

    def qvalue(x, axes):
        scale = np.abs(x).max(axes, keepdims=True) / 127
        return np.round(x / scale), scale

    x_qvalue, sx = qvalue(x, (1, 2, 3))
    w_qvalue, sw = qvalue(w, (0, 1, 2))
    g_qvalue, s = qvalue(g * sw, (1, 2, 3))
    want = float64_grads(exact, x, w_qvalue, g_qvalue * s)[1]
    np.testing.assert_allclose(gx, want, rtol=1e-4, atol=1e-4)
    g_qvalue, s = qvalue(g * sx, (0, 1, 2))
    want = float64_grads(exact, x_qvalue, w, g_qvalue * s)[2]
    np.testing.assert_allclose(gw, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["transposed", "depthwise", "batch groups"])
def test_the_backward_convolutions_are_integer(name):
    x, w, g, _, train = problem(name)
    f = functools.partial(train, backward=Backward("int8"))
    traced = jax.jit(lambda x, w, g: jax.vjp(f, x, w)[1](g)).trace(x, w, g)
    hlo = traced.lower(lowering_platforms=("cuda",)).as_text()
    convs = [line for line in hlo.splitlines() if "stablehlo.convolution" in line]
    assert len(convs) in (2, 3)
    assert all("i8>" in line and "i32>" in line for line in convs)


@pytest.mark.sample(1)
@pytest.mark.parametrize(
    ("lhs", "rhs", "backward"),
    [
        (HowToQuantize("int8", method="minmax"), INT8, Backward("int8")),
        (None, INT8, Backward("int8")),
        (INT8, None, Backward("int8")),
        (HowToQuantize("fp8"), HowToQuantize("fp8"), Backward("fp8_e5m2")),
        (HowToQuantize("int8", channelwise=False), INT8, Backward("int8", channelwise=False)),
        (INT8, INT8, Backward("int8", stochastic_rounding="uniform")),
    ],
    ids=str,
)
def test_other_formats(lhs, rhs, backward):
    x, w, g, exact, train = problem("nhwc same")
    f = functools.partial(train, lhs_how=lhs, rhs_how=rhs, backward=backward, key=jax.random.key(0))
    _, gx, gw = grads(f, x, w, g)
    _, want_x, want_w = float64_grads(exact, x, w, g)
    near = 0.1 if backward.qtype == "float8_e5m2" else 0.04
    assert relative(gx, want_x) < near
    assert relative(gw, want_w) < near


@pytest.mark.slow
def test_a_range_cuts_gradients_off():
    x, w, g, exact, train = problem("nhwc same")
    ranges = Calibration(None, jnp.full((1, 1, 1, 1), 1.0))
    for backward in (None, Backward("int8")):
        f = functools.partial(train, backward=backward, lhs_calibration=ranges)
        _, gx, _ = grads(f, x, w, g)
        want = float64_grads(exact, np.clip(x, -1, 1), w, g)[1]
        assert (np.asarray(gx)[np.abs(x) > 1] == 0).all()
        assert relative(gx, np.where(np.abs(x) > 1, 0, want)) < 0.03


TRANSFORMS = {
    "vmap, kernel shared": lambda f: lambda x, w: jax.vmap(f, (0, None))(jnp.stack([x, 2 * x]), w),
    "vmap of images": lambda f: lambda x, w: jax.vmap(lambda v: f(v[None], w)[0])(x),
    "vmap of both": lambda f: (
        lambda x, w: jax.vmap(f, 1, 1)(jnp.stack([x, 2 * x], 1), jnp.stack([w, -w], 1))
    ),
    "vmap of vmap": lambda f: (
        lambda x, w: jax.vmap(jax.vmap(f, (0, None)), (0, None))(jnp.stack([x, 2 * x])[None], w)
    ),
    "scan, remat": lambda f: (
        lambda x, w: lax.scan(jax.checkpoint(lambda c, v: (c, f(v, w))), 0, jnp.stack([x, 2 * x]))[
            1
        ]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "ranges", [None, Calibration(None, jnp.full((1,) * 4, 8.0))], ids=["", "static"]
)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformations(name, ranges, leaks):
    x, w, _, exact, train = problem("nhwc same")
    f = functools.partial(train, backward=Backward("int8"), lhs_calibration=ranges)
    fns = [TRANSFORMS[name](fn) for fn in (f, exact)]
    g = normal(*jax.eval_shape(fns[1], x, w).shape, seed=3)
    ours, theirs = (grads(fn, x, w, g, jit=j) for fn, j in zip(fns, (leaks, jax.jit), strict=True))
    for a, b in zip(ours, theirs, strict=True):
        assert relative(a, b) < 0.05
    _, tangent = leaks(lambda x, w: jax.jvp(fns[0], (x, w), (x, w)))(x, w)
    assert relative(tangent, 2 * np.asarray(theirs[0])) < 1e-5


def test_a_shared_kernel_gets_one_convolution_under_vmap():
    x, w, _, _, train = problem("nhwc same")
    f = functools.partial(train, backward=Backward("int8"))
    loss = lambda x, w: jnp.sum(jax.vmap(lambda v: f(v[None], w)[0])(x))  # noqa: E731
    hlo = jax.jit(jax.grad(loss, 1)).lower(x, w).as_text()
    # The kernel's gradient has no axis of examples.
    assert "feature_group_count = 1" in hlo
    assert all(
        "feature_group_count = 1" in line
        for line in hlo.splitlines()
        if "feature_group_count" in line
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_dtypes(dtype):
    x, w, g, _, train = problem("depthwise")
    f = functools.partial(train, backward=Backward("int8"), preferred_element_type=jnp.float32)
    out, gx, gw = grads(f, jnp.asarray(x, dtype), jnp.asarray(w, dtype), g)
    assert (out.dtype, gx.dtype, gw.dtype) == (jnp.float32, dtype, dtype)


def test_what_is_refused():
    x, w, _, _, train = problem("nhwc same")
    for options in (
        {"rhs_how": HowToQuantize("mxfp8")},
        {"backward": Backward("nvfp4")},
        {"backward": (None, Backward("int8", tile_size=2))},
    ):
        with pytest.raises(ValueError, match="must have no tiles or blocks"):
            train(x, w, **options)
