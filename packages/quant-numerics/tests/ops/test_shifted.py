"""Convolutions of small groups on CPU: sums of shifted products, beside lax and float64."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import quant_numerics as qn
from jaxtap_testkit.qarray_samples import train_conv
from quant_numerics.ops.cpu_conv import shifted_products, sums_of_places

# Input, kernel, layouts and groups.
KINDS = {
    "depthwise": ((2, 9, 11, 6), (3, 3, 1, 6), ("NHWC", "HWIO", "NHWC"), 6),
    "two outputs each": ((2, 9, 11, 6), (3, 2, 1, 12), ("NHWC", "HWIO", "NCHW"), 6),
    "groups of two": ((2, 8, 9, 10), (16, 2, 3, 3), ("NCHW", "OIHW", "NCHW"), 4),
    "one axis": ((2, 13, 8), (5, 2, 8), ("NWC", "WIO", "NWC"), 4),
    "three axes": ((1, 6, 7, 5, 4), (2, 2, 2, 1, 8), ("NDHWC", "DHWIO", "NDHWC"), 4),
}
PADDING = {"SAME": "SAME", "VALID": "VALID", "negative": [(1, -1), (2, 0), (0, 1)]}
OPTIONS = list(itertools.product((1, 2), PADDING, (1, 2), (1, 3)))


def problem(kind, stride=1, padding="SAME", lhs_dilation=1, rhs_dilation=1):
    """Return an input, a kernel, and the other arguments."""
    x_shape, w_shape, layouts, groups = KINDS[kind]
    rng, count = np.random.default_rng(0), len(x_shape) - 2
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in (x_shape, w_shape))
    pads = PADDING[padding]
    return (
        x,
        w,
        {
            "window_strides": (stride,) * count,
            "padding": pads if isinstance(pads, str) else pads[:count],
            "lhs_dilation": (lhs_dilation,) * count,
            "rhs_dilation": (rhs_dilation,) * count,
            "dimension_numbers": lax.conv_dimension_numbers(x_shape, w_shape, layouts),
            "feature_group_count": groups,
        },
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_lax(kind):
    """Each kind with a part of the options, so that all kinds together have all of them."""
    first = list(KINDS).index(kind)
    # lax has no padding by name for transposed convolutions.
    cases = [case for case in OPTIONS if case[2] == 1 or case[1] == "negative"]
    for case in cases[first :: len(KINDS)] + cases[-1:]:
        x, w, options = problem(kind, *case)
        run = functools.partial(shifted_products, sums=jnp.dtype(jnp.float32), **options)
        expected = lax.conv_general_dilated(x, w, precision="highest", **options)
        found = jax.jit(run)(x, w)
        assert found.shape == expected.shape, case
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5, err_msg=str(case))


# Input, kernel, layouts and batch groups.
BATCHED = {
    "depthwise": ((2, 9, 11, 6), (2, 7, 10, 6), ("CHWN", "IHWO", "HWNC"), 6),
    "several outputs": ((6, 3, 9, 11), (12, 3, 7, 10), ("NCHW", "OIHW", "NCHW"), 6),
    "several features": ((3, 13, 8), (10, 3, 8), ("CWN", "WIO", "NWC"), 4),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BATCHED)
def test_sums_of_places_are_those_of_lax(kind):
    x_shape, w_shape, layouts, groups = BATCHED[kind]
    count, rng = len(x_shape) - 2, np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in (x_shape, w_shape))
    cases = [case for case in OPTIONS if case[2] == 1 or case[1] == "negative"]
    for stride, padding, lhs_dilation, _ in cases[list(BATCHED).index(kind) :: len(BATCHED)]:
        pads = PADDING[padding]
        options = {
            "window_strides": (stride,) * count,
            "padding": pads if isinstance(pads, str) else pads[:count],
            "lhs_dilation": (lhs_dilation,) * count,
            "dimension_numbers": lax.conv_dimension_numbers(x_shape, w_shape, layouts),
            "batch_group_count": groups,
        }
        expected = lax.conv_general_dilated(x, w, precision="highest", **options)
        run = functools.partial(sums_of_places, sums=jnp.dtype(jnp.float32), **options)
        found = jax.jit(run)(x, w)
        assert found.shape == expected.shape, options
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4, err_msg=str(options))


@pytest.mark.sample(1)
@pytest.mark.parametrize("stride", [1, 2])
def test_gradients_of_the_kernel(stride):
    """Of integers that int8 holds, whose sums are exact: the integers that lax gives."""
    for kind in ("depthwise", "two outputs each", "one axis"):
        x, w, options = problem(kind, stride=stride)
        plain = functools.partial(lax.conv_general_dilated, precision="highest", **options)
        rng = np.random.default_rng(1)
        like = jax.eval_shape(plain, x, w)
        x, g = (rng.integers(-9, 10, one.shape).astype(np.float32) for one in (x, like))
        how, ct = (
            qn.HowToQuantize("int8", None, "fixed,-127,127"),
            qn.Backward("int8", "fixed,-127,127"),
        )
        train = functools.partial(
            train_conv, lhs_how=how, rhs_how=how, backward=(ct, ct), **options
        )

        def gradient(w, g, conv, x=x):
            return jax.vjp(lambda w: conv(x, w), w)[1](g)[0]

        found = jax.jit(functools.partial(gradient, conv=train))
        expected = jax.jit(functools.partial(gradient, conv=plain))(w, g)
        np.testing.assert_array_equal(found(w, g), expected, err_msg=kind)
        assert "convolution" not in found.lower(w, g).as_text()


def sides(kind, x_qtype, w_qtype, **options):
    x, w, options = problem(kind, **options)
    numbers = options["dimension_numbers"]
    if x_qtype is not None:
        x = qn.quantize(x, x_qtype, channel_axes=(numbers.lhs_spec[0],))
    if w_qtype is not None:
        w = qn.quantize(w, w_qtype, channel_axes=(numbers.rhs_spec[0],))
    return x, w, options


def exact(x, w, options):
    """Return the convolution in float64, without lax: windows that NumPy cuts out."""
    numbers, groups = options["dimension_numbers"], options["feature_group_count"]
    x, w = (
        np.asarray(qn.dequantize(one) if isinstance(one, qn.QArray) else one, np.float64)
        for one in (x, w)
    )
    x, w = x.transpose(numbers.lhs_spec), w.transpose(numbers.rhs_spec)
    window = w.shape[2:]
    pads = [((size - 1) // 2, size // 2) for size in window]  # as "SAME", with stride 1
    x = np.pad(x, [(0, 0), (0, 0), *pads])
    axes = tuple(range(2, x.ndim))
    cut = np.lib.stride_tricks.sliding_window_view(x, window, axes)
    cut = cut.reshape(x.shape[0], groups, -1, *cut.shape[2:])
    w = w.reshape(groups, -1, *w.shape[1:])
    space = "pqr"[: len(window)]
    taps = "xyz"[: len(window)]
    out = np.einsum(f"ngc{space}{taps},goc{taps}->ngo{space}", cut, w)
    out = out.reshape(out.shape[0], -1, *out.shape[3:])
    return out.transpose(np.argsort(numbers.out_spec))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("x_qtype", "w_qtype"),
    [("int8", "int8"), ("int16", "int8"), (None, "int8"), (None, "int4"), ("fp8", "fp8")],
)
def test_quantized(x_qtype, w_qtype):
    for kind in KINDS:
        x, w, options = sides(kind, x_qtype, w_qtype)
        conv = jax.jit(functools.partial(qn.conv_general_dilated, **options))
        np.testing.assert_allclose(
            conv(x, w), exact(x, w, options), rtol=1e-5, atol=1e-4, err_msg=kind
        )
        traced = conv.trace(x, w)
        assert "convolution" not in traced.lower().as_text(), kind
        elsewhere = traced.lower(lowering_platforms=("cuda",)).as_text()
        assert elsewhere.count("stablehlo.convolution") == 1, kind


def test_sums_that_float32_can_not_hold():
    """Of int16, they are taken in integers."""
    numbers = lax.conv_dimension_numbers((1, 8, 1), (8, 1, 1), ("NWC", "WIO", "NWC"))
    options = {"window_strides": (1,), "padding": "VALID", "dimension_numbers": numbers}
    values = np.full((1, 8, 1), 2**15 - 1, np.int16)
    values[0, 0] = 1
    x = qn.QArray(
        jnp.asarray(np.repeat(values, 2, 2)),
        jnp.ones((1, 1, 1)),
        qtype="int16",
        dtype=np.dtype("float32"),
    )
    w = qn.QArray(
        jnp.full((8, 1, 2), 127, jnp.int8),
        jnp.ones((1, 1, 1)),
        qtype="int8",
        dtype=np.dtype("float32"),
    )
    conv = functools.partial(qn.conv_general_dilated, feature_group_count=2, **options)
    found = jax.jit(conv)(x, w)
    np.testing.assert_array_equal(found, np.float32(127 * (7 * (2**15 - 1) + 1)))


def test_other_groups_and_windows_are_left():
    x, w = np.ones((1, 100, 10), np.float32), np.ones((3, 5, 10), np.float32)
    kernels = [
        (w, 2),
        (np.ones((65, 1, 10), np.float32), 10),
        (np.ones((1, 1, 10), np.float32), 10),
    ]
    kernels.append((np.ones((3, 1, 90), np.float32), 10))
    stored = jax.jit(lambda kernels: [qn.quantize(w, "int8") for w in kernels])
    for q, (_, groups) in zip(stored([kernel for kernel, _ in kernels]), kernels, strict=True):
        conv = functools.partial(
            qn.conv_general_dilated,
            window_strides=(1,),
            padding="VALID",
            dimension_numbers=("NWC", "WIO", "NWC"),
            feature_group_count=groups,
        )
        assert "stablehlo.convolution" in jax.jit(conv).lower(x, q).as_text()


@pytest.mark.slow
def test_gradients_of_the_input():
    """Of a float input and stored weights, through the products."""
    x, w, options = sides("depthwise", None, "int8")

    def loss(conv, w, x):
        return jnp.sum(jnp.sin(conv(x, w, **options)))

    plain = functools.partial(lax.conv_general_dilated, precision="highest")
    expected = jax.grad(functools.partial(loss, plain, qn.dequantize(w)))(x)
    found = jax.jit(jax.grad(functools.partial(loss, qn.conv_general_dilated, w)))(x)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_wrong_arguments_get_the_error_of_lax():
    x, w, options = sides("depthwise", None, "int8")
    for wrong in ({"feature_group_count": 3}, {"window_strides": (1,)}, {"rhs_dilation": (0, 1)}):
        with pytest.raises((TypeError, ValueError)) as plain:
            lax.conv_general_dilated(x, qn.dequantize(w), **options | wrong)
        with pytest.raises(type(plain.value)) as ours:
            qn.conv_general_dilated(x, w, **options | wrong)
        assert str(ours.value) == str(plain.value)


@pytest.mark.slow
def test_nothing_and_no_place_for_a_window():
    # The last is so small that elements of a window begin beyond it.
    for shape in ((0, 9, 11, 6), (2, 2, 2, 6), (2, 9, 1, 6)):
        _, w, options = sides("depthwise", None, "int8", padding="VALID")
        found = qn.conv_general_dilated(jnp.ones(shape), w, **options)
        wanted = lax.conv_general_dilated(jnp.ones(shape), qn.dequantize(w), **options)
        assert found.shape == wanted.shape
