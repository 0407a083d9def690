import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax

from jaxtap_testkit import examples
from jaxtap_testkit.programs import as_program
from jaxtap_testkit.qarray_samples import CONVOLUTIONS, value
from quant_numerics import (
    QArray,
    conv_general_dilated,
    dequantize,
    get_qtype,
    is_pointwise,
    qarray,
    quantize,
    quantize_for_dot,
)

pytestmark = pytest.mark.sample(2)

dequantize, quantize, quantize_for_dot = map(as_program, (dequantize, quantize, quantize_for_dot))
INF, NAN = float("inf"), float("nan")


def run(lhs, rhs, *args, **options):
    return jax.jit(lambda a, b: conv_general_dilated(a, b, *args, **options))(lhs, rhs)


def reference(lhs, rhs, *args, **options):
    """The convolution in float64."""
    with jax.enable_x64(True):
        conv = jax.jit(lambda a, b: lax.conv_general_dilated(a, b, *args, **options))
        return np.asarray(conv(value(lhs), value(rhs)))


def coarse(shape, channel_axis, seed, qtype="int8"):
    """A QArray with scales 0.5, 1 and 2 and few bits, so that float32 sums are exact."""
    rng = np.random.default_rng(seed)
    qvalue = rng.integers(-7, 8, shape).astype(get_qtype(qtype).storage_dtype)
    scale_shape = [n if a == channel_axis else 1 for a, n in enumerate(shape)]
    scale = (2.0 ** rng.integers(-1, 2, scale_shape)).astype(np.float32)
    return qarray(qvalue, scale, qtype, jnp.float32)


def channel_axes(shape_l, shape_r, options):
    dn = lax.conv_dimension_numbers(shape_l, shape_r, options.get("dimension_numbers"))
    return dn.lhs_spec[0], dn.rhs_spec[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVOLUTIONS)
def test_integer_convolutions_are_exact(name):
    shape_l, shape_r, args, options = CONVOLUTIONS[name]
    axis_l, axis_r = channel_axes(shape_l, shape_r, options)
    lhs, rhs = coarse(shape_l, axis_l, 0), coarse(shape_r, axis_r, 1, "int4")
    out = run(lhs, rhs, *args, **options)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, reference(lhs, rhs, *args, **options))


@pytest.mark.slow
@pytest.mark.parametrize("which", ["lhs", "rhs"])
@pytest.mark.parametrize("name", ["mixed layouts", "transposed", "feature groups", "batch groups"])
def test_weight_only_convolutions_are_exact(name, which):
    shape_l, shape_r, args, options = CONVOLUTIONS[name]
    axis_l, axis_r = channel_axes(shape_l, shape_r, options)
    lhs, rhs = coarse(shape_l, axis_l, 0), coarse(shape_r, axis_r, 1)
    if which == "lhs":
        rhs = jnp.asarray(value(rhs)).astype(jnp.bfloat16)
    else:
        lhs = jnp.asarray(value(lhs)).astype(jnp.bfloat16)
    out = run(lhs, rhs, *args, **options)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, reference(lhs, rhs, *args, **options))


@st.composite
def problems(draw):
    """A one-dimensional convolution with any strides, dilations, padding and groups."""
    small = st.integers(1, 3)
    groups, batch_groups = draw(st.sampled_from([(1, 1), (1, 1), (2, 1), (1, 2), (3, 1)]))
    window, dilation_r = draw(small), draw(small)
    size = draw(st.integers(dilation_r * (window - 1) + 1, 10))
    features_in = draw(small)
    shape_l = (draw(small) * batch_groups, features_in * groups, size)
    shape_r = (draw(small) * groups * batch_groups, features_in, window)
    seed = draw(st.integers(0, 99))
    lhs = coarse(shape_l, draw(st.sampled_from([0, None])), seed)
    rhs = coarse(shape_r, draw(st.sampled_from([0, None])), seed + 1)
    padding = [(draw(st.integers(-1, 2)), draw(st.integers(0, 2)))]
    args = ((draw(small),), padding, (draw(small),), (dilation_r,))
    return lhs, rhs, args, {"feature_group_count": groups, "batch_group_count": batch_groups}


@pytest.mark.slow
@examples(20)
@given(problems())
def test_any_convolution_is_exact(problem):
    lhs, rhs, args, options = problem
    np.testing.assert_array_equal(
        run(lhs, rhs, *args, **options), reference(lhs, rhs, *args, **options)
    )


def test_int8_reaches_the_convolution_and_int32_leaves_it(primitives):
    shape_l, shape_r, args, options = CONVOLUTIONS["nhwc same"]
    for qtype in ("int8", "int4"):
        lhs, rhs = coarse(shape_l, 0, 0), coarse(shape_r, 3, 1, qtype)
        fn = functools.partial(
            conv_general_dilated, window_strides=args[0], padding=args[1], **options
        )
        hlo = jax.jit(fn).trace(lhs, rhs).lower(lowering_platforms=("cuda",)).as_text()
        (conv,) = (line for line in hlo.splitlines() if "stablehlo.convolution" in line)
        assert conv.count("xi8>") == 2
        assert conv.count("xi32>") == 1
        convs = [
            e
            for e in primitives(fn, jnp.ones(shape_l, jnp.bfloat16), rhs)
            if e[0].startswith("conv_general")
        ]
        assert convs == [("conv_general_dilated", ["bfloat16", "bfloat16"], ["float32"])]


@pytest.mark.slow
@examples(10)
@given(st.sampled_from(["int8", "int4"]), st.integers(0, 99), st.integers(1, 3))
def test_error_is_within_the_analytic_bound(qtype, seed, features):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, features, 7)).astype(np.float32)
    w = rng.normal(size=(4, features, 3)).astype(np.float32)
    dn = lax.conv_dimension_numbers(x.shape, w.shape, None)

    @jax.jit
    def f(x, w):
        lhs = quantize(x, qtype, channel_axes=dn.lhs_spec[:1])
        rhs = quantize(w, qtype, channel_axes=dn.rhs_spec[:1])
        return conv_general_dilated(lhs, rhs, (1,), "SAME"), lhs.scale, rhs.scale

    out, sx, sw = map(np.asarray, f(x, w))
    sw, x_max = sw.reshape(1, -1, 1), np.abs(x).max((1, 2), keepdims=True)
    w_max = np.abs(w).max((1, 2)).reshape(1, -1, 1)
    bound = 3 * features * (sx / 2 * w_max + sw / 2 * x_max + sx * sw / 4)
    assert np.all(np.abs(out - reference(x, w, (1,), "SAME")) <= bound * (1 + 1e-4))


@pytest.mark.parametrize("which", ["both", "lhs", "rhs"])
@pytest.mark.parametrize("bad", [INF, -INF, NAN])
def test_a_non_finite_value_spoils_its_sample_or_feature_and_no_other(bad, which):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 2, 8)).astype(np.float32)
    w = rng.normal(size=(4, 2, 3)).astype(np.float32)
    x[1, 0, 2] = bad
    w[2, 1, 0] = bad
    dn = lax.conv_dimension_numbers(x.shape, w.shape, None)

    @jax.jit
    def both(x, w):
        lhs = x if which == "rhs" else quantize(x, "int8", channel_axes=dn.lhs_spec[:1])
        rhs = w if which == "lhs" else quantize(w, "int8", channel_axes=dn.rhs_spec[:1])
        ours = conv_general_dilated(lhs, rhs, (1,), "VALID")
        return ours, lax.conv_general_dilated(x, w, (1,), "VALID")

    ours, theirs = map(np.asarray, both(x, w))
    spoiled = np.zeros((3, 4), bool)
    spoiled[1], spoiled[:, 2] = True, True
    finite = np.isfinite(ours)
    assert finite[~spoiled].all()
    assert not finite[~np.isfinite(theirs)].any()
    if which == "both":
        assert not finite[spoiled].any()


def test_infinities_keep_their_sign():
    x, w = np.ones((1, 1, 4), np.float32), np.ones((1, 1, 2), np.float32)
    x[0, 0, 1] = -INF
    lhs, rhs = jax.jit(lambda x, w: (quantize(x, "int8"), quantize(w, "int8")))(x, w)
    out = run(lhs, rhs, (1,), "VALID")
    assert out[0, 0, :2].tolist() == [-INF, -INF]
    assert jnp.isnan(out[0, 0, 2])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape_l", "shape_r"),
    [
        ((0, 2, 5), (3, 2, 2)),
        ((2, 0, 5), (3, 0, 2)),
        ((2, 2, 5), (0, 2, 2)),
        ((2, 2, 0), (3, 2, 2)),
    ],
)
def test_sizes_of_zero(shape_l, shape_r):
    x, w = jnp.ones(shape_l), jnp.ones(shape_r)
    want = lax.conv_general_dilated(x, w, (1,), "SAME")
    dn = lax.conv_dimension_numbers(shape_l, shape_r, None)

    @jax.jit
    def f(x, w):
        lhs, rhs = (
            quantize(x, "int8", channel_axes=dn.lhs_spec[:1]),
            quantize(w, "int8", channel_axes=dn.rhs_spec[:1]),
        )
        return conv_general_dilated(lhs, rhs, (1,), "SAME")

    assert jnp.array_equal(f(x, w), want)


def test_all_zero_operands_give_zeros():
    lhs = jax.jit(lambda: quantize(jnp.zeros((2, 3, 4)), "int8", channel_axes=(0,)))()
    out = run(lhs, coarse((4, 3, 2), 0, 0), (1,), "SAME")
    assert jnp.array_equal(out, jnp.zeros((2, 4, 4)))


@pytest.mark.parametrize("which", ["both", "lhs", "rhs", "neither"])
def test_output_dtype(which):
    def dtype(a, b, **options):
        def f(x, w):
            lhs = quantize(x, "int8") if which in ("both", "lhs") else x
            rhs = quantize(w, "int8") if which in ("both", "rhs") else w
            return conv_general_dilated(lhs, rhs, (1,), "SAME", **options)

        return jax.eval_shape(f, jnp.ones((2, 3, 4), a), jnp.ones((4, 3, 2), b)).dtype

    assert dtype("bfloat16", "bfloat16") == jnp.bfloat16
    assert dtype("bfloat16", "float16") == jnp.float32
    assert dtype("float16", "float32") == jnp.float32
    assert dtype("float32", "float32", preferred_element_type=jnp.bfloat16) == jnp.bfloat16


def test_float64_under_x64():
    with jax.enable_x64(True):
        x = np.random.default_rng(0).normal(size=(2, 3, 6))
        w = coarse((4, 3, 2), 0, 0)
        out = run(x, w, (1,), "SAME")
        assert out.dtype == jnp.float64
        np.testing.assert_allclose(out, reference(x, w, (1,), "SAME"), rtol=1e-12)


def test_float_operands_are_a_plain_convolution():
    x, w = value(coarse((2, 3, 6), 0, 0)), value(coarse((4, 3, 2), 0, 1))
    out = run(jnp.float32(x), jnp.float32(w), (1,), "SAME")
    np.testing.assert_array_equal(out, reference(x, w, (1,), "SAME"))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_gradient_of_a_weight_only_convolution(dtype):
    x, w = jnp.ones((2, 3, 6), dtype), coarse((4, 3, 2), 0, 0)

    def loss(x):
        out = conv_general_dilated(x, w, (1,), "VALID", preferred_element_type=jnp.float32)
        return out[:, :, 2].sum()

    grad = jax.jit(jax.grad(loss))(x)
    assert grad.dtype == dtype
    want = np.zeros((2, 3, 6), np.float32)
    want[:, :, 2:4] = value(w).sum(0)
    np.testing.assert_array_equal(grad.astype(jnp.float32), want)


def test_vmap():
    lhs, rhs = coarse((3, 2, 3, 6), 0, 0), coarse((4, 3, 2), 0, 1)
    out = jax.jit(jax.vmap(lambda x: conv_general_dilated(x, rhs, (1,), "SAME")))(lhs)
    for i in range(3):
        one = QArray(lhs.qvalue[i], lhs.scale[i], qtype=lhs.qtype, dtype=lhs.dtype)
        np.testing.assert_array_equal(out[i], reference(one, rhs, (1,), "SAME"))


def test_other_scales_are_refused():
    lhs, rhs = coarse((2, 3, 6), 0, 0), coarse((4, 3, 2), 0, 1)
    with pytest.raises(
        ValueError, match=r"one per batch element \(shape \(2, 1, 1\)\), got .*3, 1"
    ):
        conv_general_dilated(coarse((2, 3, 6), 1, 0), rhs, (1,), "SAME")
    with pytest.raises(ValueError, match=r"one per output feature \(shape \(4, 1, 1\)\), got"):
        conv_general_dilated(lhs, coarse((4, 3, 2), 1, 0), (1,), "SAME")
    tiled = qarray(lhs.qvalue, jnp.ones((1, 1, 2)), "int8", jnp.float32)
    with pytest.raises(ValueError, match="Quantize it with quantize"):
        conv_general_dilated(tiled, rhs, (1,), "SAME")


def ones(shape, qtype="int8"):
    """All quantized values are as large as can be."""
    return jax.jit(lambda: quantize(jnp.ones(shape), qtype))()


def test_sums_that_could_overflow_int32_are_cut():
    lhs, rhs = ones((1, 9, 33287)), ones((1, 9, 33287))
    np.testing.assert_allclose(run(lhs, rhs, (1,), "VALID"), [[[9 * 33287]]], rtol=1e-6)
    lhs, rhs = ones((1, 5, 200), "int16"), ones((1, 5, 200))
    np.testing.assert_allclose(run(lhs, rhs, (1,), "VALID"), [[[1000]]], rtol=1e-6)


def test_sums_that_cannot_be_cut_are_refused():
    def conv(features, window, which, **options):
        return jax.eval_shape(
            lambda x, w: conv_general_dilated(
                quantize(x, which[0]), quantize(w, which[1]), (1,), "VALID", **options
            ),
            jnp.ones((1, features, window)),
            jnp.ones((1, features, window)),
        ).shape

    assert conv(1, 131071, ("int8", "int8")) == (1, 1, 1)
    message = "must be at most 131071, with numbers up to 128 .* got 131072"
    with pytest.raises(ValueError, match=message):
        conv(1, 131072, ("int8", "int8"))
    assert conv(1, 131072, ("int8", "int4")) == (1, 1, 1)
    with pytest.raises(ValueError, match="split the input features"):
        jax.eval_shape(
            lambda: conv_general_dilated(
                ones((1, 4, 99999)), ones((2, 2, 99999)), (1,), "VALID", feature_group_count=2
            )
        )


def test_the_largest_sum_is_exact():
    ones = jax.jit(lambda: quantize(jnp.ones((1, 4, 33286)), "int8"))()
    np.testing.assert_allclose(run(ones, ones, (1,), "VALID"), [[[4 * 33286]]], rtol=1e-6)


def pointed(shape, channel_axis, seed, qtype="int8"):
    """A QArray with zero points, and few bits otherwise."""
    q = coarse(shape, channel_axis, seed, qtype)
    low, high = get_qtype(qtype).asymmetric
    points = np.random.default_rng(seed).integers(low, high + 1, q.scale.shape)
    return qarray(q.qvalue, q.scale, qtype, jnp.float32, zero_point=points.astype(q.qvalue.dtype))


def pointed_value(q):
    points = 0 if q.zero_point is None else np.asarray(q.zero_point).astype(np.float64)
    return (np.asarray(q.qvalue).astype(np.float64) - points) * np.asarray(q.scale)


@pytest.mark.slow
@pytest.mark.parametrize("name", CONVOLUTIONS)
@pytest.mark.parametrize(("left", "right"), [("int8", "int8"), ("int4", "int8"), ("int4", "int4")])
def test_zero_points_are_exact_also_at_the_padding(name, left, right):
    shape_l, shape_r, args, options = CONVOLUTIONS[name]
    axis_l, axis_r = channel_axes(shape_l, shape_r, options)
    lhs, rhs = pointed(shape_l, axis_l, 0, left), coarse(shape_r, axis_r, 1, right)
    for a, b in ((lhs, rhs), (lhs, pointed(shape_r, axis_r, 2, right))):
        want = reference(pointed_value(a), pointed_value(b), *args, **options)
        np.testing.assert_array_equal(run(a, b, *args, **options), want)


FORMATS = ["int2", "int16", "fp8", "fp8_e5m2", "fp4", "nf4"]


@pytest.mark.parametrize("left", [*FORMATS, None])
@pytest.mark.parametrize("right", ["int8", "fp8", "nf4"])
def test_all_formats(left, right):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 3, 6)).astype(np.float32)
    w = rng.normal(size=(4, 3, 2)).astype(np.float32)
    dn = lax.conv_dimension_numbers(x.shape, w.shape, None)

    @jax.jit
    def f(x, w):
        lhs = x if left is None else quantize(x, left, channel_axes=dn.lhs_spec[:1])
        rhs = quantize(w, right, channel_axes=dn.rhs_spec[:1])
        numbers = [a if not isinstance(a, QArray) else dequantize(a) for a in (lhs, rhs)]
        return conv_general_dilated(lhs, rhs, (1,), "SAME"), numbers

    out, (lhs, rhs) = f(x, w)
    # Dequantized numbers are rounded to float32.
    np.testing.assert_allclose(out, reference(lhs, rhs, (1,), "SAME"), rtol=2e-6, atol=3e-6)


def test_equal_float8_formats_are_not_converted(primitives):
    lhs, rhs = ones((2, 3, 6), "fp8"), ones((4, 3, 2), "fp8")
    fn = functools.partial(conv_general_dilated, window_strides=(1,), padding="SAME")
    convs = [e for e in primitives(fn, lhs, rhs) if e[0].startswith("conv_general")]
    assert convs == [("conv_general_dilated", ["float8_e4m3fn"] * 2, ["float32"])]


@pytest.mark.parametrize(
    ("features", "window", "in_floats", "convolutions"),
    [
        (4, 3, True, 1),
        (1024, 1, True, 1),
        (1025, 1, True, 2),
        (2, 1024, True, 2),
        (2, 1025, False, 1),
    ],
)
def test_on_cpu_floats_are_used_where_they_are_exact(features, window, in_floats, convolutions):
    """The largest sums, less one product, of an odd number: float32 must not round it.

    Files of others have -128, whose 1024 products reach 2**24.
    """
    qvalue = np.full((1, features, window), -128, np.int8)
    qvalue[0, 0, 0] = -127
    one = np.ones((1, 1, 1), np.float32)
    lhs = qarray(qvalue, one, "int8", jnp.float32)
    rhs = qarray(qvalue, one, "int8", jnp.float32)
    lowered = jax.jit(lambda a, b: conv_general_dilated(a, b, (1,), "VALID")).lower(lhs, rhs)
    lines = [x for x in lowered.as_text().splitlines() if "stablehlo.convolution" in x]
    assert len(lines) == convolutions
    assert all(("xf32>" in line) == in_floats for line in lines)
    exact = (features * window - 1) * 128 * 128 + 127 * 127
    np.testing.assert_array_equal(lowered.compile()(lhs, rhs), np.float32([[[exact]]]))


def test_a_kernel_with_tiles_is_dequantized():
    rng = np.random.default_rng(0)
    x, w = (rng.normal(size=shape).astype(np.float32) for shape in ((2, 7, 40), (3, 40, 5)))
    layout = ("NHC", "HIO", "NHC")
    for tile, scales in ((32, (3, 2, 5)), (40, (3, 1, 5))):
        q = jax.jit(lambda w, tile=tile: quantize_for_dot(w, (0, 1), "int4", tile))(w)
        assert q.scale.shape == scales
        got = run(x, q, (1,), "SAME", dimension_numbers=layout)
        want = reference(x, dequantize(q), (1,), "SAME", dimension_numbers=layout)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-4)
        with pytest.raises(ValueError, match="Quantize it with quantize"):
            run(quantize(x, "int8"), q, (1,), "SAME", dimension_numbers=layout)
    assert quantize_for_dot(w, (0, 1), "mxfp4").scale.shape == (3, 2, 5)


POINTWISE = {
    "images": (("NHWC", "HWIO", "NHWC"), (3, 5, 4, 12), (1, 1, 12, 6), (1, 1), "SAME"),
    "strides": (("NCHW", "OIHW", "NCHW"), (3, 12, 5, 4), (6, 12, 1, 1), (2, 3), "VALID"),
    "other axes": (("WNC", "WOI", "NCW"), (7, 3, 12), (1, 6, 12), (2,), [(0, 0)]),
    "result first": (("CN", "IO", "CN"), (12, 3), (12, 6), (), []),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", POINTWISE)
def test_a_pointwise_kernel_keeps_its_tiles(case, primitives):
    layout, shape_l, shape_r, strides, padding = POINTWISE[case]
    lhs = coarse(shape_l, layout[0].index("N"), 0)
    tiles = [{"I": 3, "O": 6}.get(name, 1) for name in layout[1]]
    scale = 2.0 ** np.random.default_rng(1).integers(-1, 2, tiles)
    values = coarse(shape_r, 0, 2, "int4").qvalue
    rhs = qarray(values, jnp.asarray(scale, "float32"), "int4", jnp.float32)
    convolve = functools.partial(
        conv_general_dilated, window_strides=strides, padding=padding, dimension_numbers=layout
    )
    exact = reference(lhs, rhs, strides, padding, dimension_numbers=layout)
    np.testing.assert_array_equal(jax.jit(convolve)(lhs, rhs), exact)
    used = {name for name, *_ in primitives(convolve, lhs, rhs)}
    assert "dot_general" in used
    assert "conv_general_dilated" not in used


def test_what_is_pointwise():
    dn = lax.conv_dimension_numbers((1, 8, 8, 4), (1, 1, 4, 4), ("NHWC", "HWIO", "NHWC"))
    ask = functools.partial(is_pointwise, (1, 1, 4, 4), dn)
    assert ask(padding="SAME")
    assert ask(padding=((0, 0), (0, 0)), window_strides=(2, 2), rhs_dilation=(3, 3))
    assert not ask(padding=((0, 0), (0, 1)))
    assert not ask(lhs_dilation=(1, 2))
    assert not ask(feature_group_count=2)
    assert not ask(batch_group_count=2)
    assert not is_pointwise((1, 3, 4, 4), dn)
