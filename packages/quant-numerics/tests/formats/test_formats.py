"""quantize and dequantize in every format."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxtap_testkit.qarray_samples import per_element, value
from quant_numerics import (
    QTYPES,
    calibrate,
    dequantize,
    get_qtype,
    quantize,
    quantize_for_dot,
    quantize_with,
    scale_of,
)

pytestmark = pytest.mark.sample(2)

INF, NAN = float("inf"), float("nan")
TINY = float(jnp.finfo(jnp.float32).tiny)
INTS = [k.name for k in QTYPES.values() if k.kind == "int"]
PLAIN_FLOATS = ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
ML = {
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
    "float4_e2m1fn": ml_dtypes.float4_e2m1fn,
    "mxfp8": ml_dtypes.float8_e4m3fn,
    "mxfp4": ml_dtypes.float4_e2m1fn,
    "nvfp4": ml_dtypes.float4_e2m1fn,
}


def rows(kind):
    """Options for one slice per row; the rows have 64 elements."""
    block = QTYPES[kind].block
    return (
        {"channel_axes": (0,)} if block is None else {"channel_axes": (0,), "tile_axes": {1: block}}
    )


def compiled(x, qtype, **options):
    return jax.jit(lambda x: quantize(x, qtype, **options))(x)


def sample(seed=0, shape=(4, 64)):
    rng = np.random.default_rng(seed)
    return (rng.normal(size=shape) * 2.0 ** rng.integers(-9, 9, (shape[0], 1))).astype(np.float32)


@pytest.mark.slow
@pytest.mark.parametrize("qtype", QTYPES)
def test_dequantize_is_the_meaning_of_a_qarray(qtype):
    q = compiled(sample(), qtype, **rows(qtype))
    kind = get_qtype(qtype)
    assert (q.qtype, q.dtype) == (qtype, jnp.float32)
    assert (q.qvalue.dtype, q.scale.dtype) == (kind.storage_dtype, kind.scale_dtype)
    assert (q.global_scale is not None) == (qtype == "nvfp4")
    np.testing.assert_allclose(jax.jit(dequantize)(q), value(q), rtol=2e-7)


@pytest.mark.parametrize("qtype", INTS)
@pytest.mark.parametrize("method", ["absmax", "minmax"])
@pytest.mark.parametrize("seed", [0, 1])
def test_integers_are_within_half_a_step(qtype, method, seed):
    x = sample(seed) + np.float32(seed)
    q = compiled(x, qtype, method=method, **rows(qtype))
    step = per_element(q.scale, x.shape)
    assert np.all(np.abs(value(q) - x) <= step * (0.5 + 1e-2 * (qtype == "int16") + 1e-4))
    qvalue = np.asarray(q.qvalue).astype(int)
    kind = get_qtype(qtype)
    low, high = (-kind.qmax, kind.qmax) if method == "absmax" else kind.asymmetric
    assert low <= qvalue.min()
    assert qvalue.max() <= high
    # The range is used to its ends.
    assert qvalue.max() - qvalue.min() >= (high - low) // 2


@pytest.mark.slow
@pytest.mark.parametrize("qtype", INTS)
def test_zero_points_make_zero_exact(qtype):
    x = np.float32([[0, 3, 1, 0.5], [0, -3, -1, -0.5], [0, 1, -2, 5], [0, 0, 0, 0]])
    q = compiled(x, qtype, channel_axes=(0,), method="minmax")
    assert q.zero_point.dtype == q.qvalue.dtype
    assert np.all(np.asarray(dequantize(q))[:, 0] == 0)
    kind = get_qtype(qtype)
    points = np.asarray(q.zero_point).astype(int)[:, 0].tolist()
    assert points[:2] == [*kind.asymmetric]  # data above zero, data below zero
    np.testing.assert_allclose(q.scale[2, 0], 7 / (2**kind.bits - 1), rtol=1e-6)


@pytest.mark.parametrize("qtype", PLAIN_FLOATS)
@pytest.mark.parametrize("seed", [0, 1])
def test_floats_round_to_the_nearest_number_of_the_format(qtype, seed):
    x = sample(seed)
    q = compiled(x, qtype, **rows(qtype))
    kind = get_qtype(qtype)
    scale = np.abs(x).max(1, keepdims=True) / np.float32(kind.qmax)
    np.testing.assert_allclose(q.scale, scale, rtol=3e-7)
    want = np.clip(x / np.asarray(q.scale), -kind.qmax, kind.qmax).astype(ML[qtype])
    np.testing.assert_array_equal(np.asarray(q.qvalue).astype(np.float32), want.astype(np.float32))


def test_nf4_takes_the_nearest_entry():
    x = np.linspace(-3, 3, 257, dtype=np.float32)[None]
    q = compiled(x, "nf4", channel_axes=(0,))
    book = np.array(get_qtype("nf4").codebook)
    assert len(book) == 16
    assert np.all(np.diff(book) > 0)
    distance = np.abs(x[0][:, None] / 3 - book)
    chosen = distance[np.arange(257), np.asarray(q.qvalue[0]).astype(int)]
    np.testing.assert_allclose(chosen, distance.min(1), atol=1e-6)
    assert set(np.asarray(q.qvalue[0]).astype(int)) == set(range(16))


@pytest.mark.parametrize("qtype", ["mxfp8", "mxfp4"])
@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_mx_scales_are_the_specifications_powers_of_two(qtype, magnitude):
    x = sample() * np.float32(magnitude)
    q = compiled(x, qtype, **rows(qtype))
    blocks = np.abs(x.reshape(4, 2, 32)).max(-1).astype(np.float64)
    largest = {"mxfp8": 8, "mxfp4": 2}[qtype]
    want = 2.0 ** np.maximum(np.floor(np.log2(blocks)) - largest, -126)
    np.testing.assert_array_equal(np.asarray(q.scale).astype(np.float64), want)
    kind = get_qtype(qtype)
    qvalue = np.clip(x / per_element(want, x.shape), -kind.qmax, kind.qmax)
    np.testing.assert_array_equal(
        np.asarray(q.qvalue).astype(np.float32), qvalue.astype(ML[qtype]).astype(np.float32)
    )


def test_mx_scales_at_powers_of_two():
    below = float(np.nextafter(np.float32(4), np.float32(0)))
    x = np.zeros((3, 32), np.float32)
    x[:, 0] = [4.0, below, -6.0]
    q = compiled(x, "mxfp4", **rows("mxfp4"))
    assert q.scale.astype(jnp.float32)[:, 0].tolist() == [1.0, 0.5, 1.0]
    assert q.qvalue.astype(jnp.float32)[:, 0].tolist() == [4.0, 6.0, -6.0]  # 8 saturates


@pytest.mark.parametrize("magnitude", [1e-30, 1.0, 1e30])
def test_nvfp4_scales_are_of_two_levels(magnitude):
    x = sample() * np.float32(magnitude)
    q = compiled(x, "nvfp4", **rows("nvfp4"))
    assert q.global_scale.shape == (1, 1)
    outer = np.abs(x).max().astype(np.float64) / (448 * 6)
    np.testing.assert_allclose(q.global_scale[0, 0], outer, rtol=1e-6)
    blocks = np.abs(x.reshape(4, 4, 16)).max(-1) / 6 / np.asarray(q.global_scale)
    want = np.clip(blocks, 2.0**-9, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    # XLA may divide in another order; then a scale can be the neighbour, an eighth away.
    np.testing.assert_allclose(np.asarray(q.scale).astype(np.float32), want, rtol=0.13)
    assert np.mean(np.asarray(q.scale).astype(np.float32) == want) > 0.9
    assert np.asarray(q.scale).astype(np.float32).max() == 448


def check_errors(x, q):
    x = np.asarray(x).astype(np.float64)
    scale = per_element(q.scale, x.shape)
    if q.global_scale is not None:
        scale = scale * per_element(q.global_scale, x.shape)
    kind = get_qtype(q.qtype)
    if kind.codebook:
        bound = np.diff(kind.codebook).max() / 2 * scale
    else:
        info = ml_dtypes.finfo(ML[q.qtype])
        # Half a unit in the last place; what saturates comes from less than 2**emax * 2 (mx), or
        # from a block scale that was rounded down by a 16th (nvfp4).
        ulp = 2.0 ** (
            np.floor(np.log2(np.maximum(np.abs(x) / scale, 2.0**info.minexp))) - info.nmant
        )
        beyond = np.maximum(np.abs(x) / scale - kind.qmax, 0)
        slack = {"mxfp8": 64, "mxfp4": 2}.get(q.qtype, 1e-3)
        if q.qtype == "nvfp4":  # a subnormal block scale may be rounded by a third
            slack = np.where(per_element(q.scale, x.shape) >= 2.0**-6, 0.4, 3)
        assert np.all(beyond <= slack)
        bound = np.maximum(ulp / 2, beyond) * scale
    assert np.all(np.abs(value(q) - x) <= bound * (1 + 1e-5))


# XLA's cheap emitters convert to float4 otherwise.
FLOAT4 = [
    pytest.param(qtype, marks=pytest.mark.optimized)
    for qtype in ("float4_e2m1fn", "mxfp4", "nvfp4")
]


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["float8_e4m3fn", "float8_e5m2", "mxfp8", "nf4", *FLOAT4])
def test_the_error_of_a_float_format_is_bounded(qtype):
    run = jax.jit(
        lambda x: [
            quantize(x.astype(dtype), qtype, **rows(qtype))
            for dtype in (jnp.float32, jnp.bfloat16, jnp.float16)
        ]
    )
    for seed in range(10):
        x = sample(seed)
        for q in run(x):
            check_errors(jnp.asarray(x).astype(q.dtype), q)


SPECIAL = {
    "zeros": [0.0, -0.0],
    "tiny": [TINY, -TINY / 2],
    "inf": [INF, -INF],
    "nan": [NAN, 3.0],
    "nan and inf": [NAN, -INF],
    "huge": [3.4e38, -3.4e38],
    "wide": [3.4e38, 1e38],
    "one": [1.0, -1.0],
}


SYMMETRIC = ["absmax", "rms,3", "percentile,60", "mse,4"]


@pytest.mark.parametrize(
    ("qtype", "method"),
    [(q, m) for q in QTYPES for m in SYMMETRIC] + [(q, "minmax") for q in INTS],
)
def test_special_slices(qtype, method):
    width = QTYPES[qtype].block or 8
    x = np.zeros((len(SPECIAL), width), np.float32)
    x[:, :2] = list(SPECIAL.values())
    if method == "minmax":  # the ends of its range may be a step outside the data's
        x[list(SPECIAL).index("huge"), :2] = [1.1e38, -1.1e38]
    x[:, 2] = np.where(np.isfinite(x[:, 0]), 0, 1)
    options = {"channel_axes": (0,)}
    if QTYPES[qtype].block:
        options["tile_axes"] = {1: width}
    q = compiled(x, qtype, method=method, **options)
    back = dict(zip(SPECIAL, np.asarray(jax.jit(dequantize)(q)), strict=True))
    for name, row in zip(SPECIAL, x, strict=True):
        finite = np.isfinite(row).all()
        # All of a slice is non-finite, or none of it, also beside others that are not.
        assert np.isfinite(back[name]).tolist() == [finite] * width, name
    assert np.all(back["zeros"] == 0)
    if get_qtype(qtype).scale_dtype == jnp.float32:
        assert back["inf"][:2].tolist() == [INF, -INF]
    step = {"absmax": 0.5, "minmax": 0.5}.get(method)
    if QTYPES[qtype].kind == "int" and step:
        scale = np.asarray(q.scale).astype(np.float64)[list(SPECIAL).index("wide")]
        assert np.all(np.abs(back["wide"] - [*SPECIAL["wide"], *[0] * 6]) <= scale * 0.5001)


def test_the_largest_floats_in_nf4():
    q = compiled(np.float32([3.4e38, 1.7e38, 0, -3.4e38]), "nf4")
    assert np.asarray(q.qvalue).astype(int).tolist() == [15, 12, 7, 0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("qtype", QTYPES)
def test_size_zero(qtype):
    q = compiled(jnp.zeros((0, 64)), qtype, **rows(qtype))
    assert dequantize(q).shape == (0, 64)
    for method in ("rms,2", "percentile,90", "mse"):
        assert compiled(jnp.zeros((0, 64)), qtype, method=method, **rows(qtype)).shape == (0, 64)


@pytest.mark.slow
@pytest.mark.parametrize("qtype", QTYPES)
def test_quantize_is_calibrate_then_scale_of_then_quantize_with(qtype):
    x, options = sample(), rows(qtype)
    whole = compiled(x, qtype, **options)

    @jax.jit
    def parts(x):
        calibration = calibrate(x, qtype, **options)
        return quantize_with(x, qtype, *scale_of(calibration, qtype))

    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(parts(x)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert jax.tree.structure(whole) == jax.tree.structure(parts(x))


@pytest.mark.slow
@pytest.mark.parametrize("qtype", QTYPES)
def test_vmap_is_a_channel_axis(qtype):
    x = np.stack([sample(0), sample(1)])
    mapped = jax.jit(jax.vmap(lambda x: quantize(x, qtype, **rows(qtype))))(x)
    for i in range(2):
        one = compiled(x[i], qtype, **rows(qtype))
        np.testing.assert_array_equal(
            np.asarray(dequantize(mapped))[i].astype(np.float32), dequantize(one)
        )


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["int8", "float8_e4m3fn", "mxfp4", "nvfp4", "nf4"])
def test_float64(qtype):
    with jax.enable_x64(True):
        x = sample().astype(np.float64)
        q = compiled(x, qtype, **rows(qtype))
        assert q.dtype == jnp.float64
        back = dequantize(q)
        assert back.dtype == jnp.float64
        np.testing.assert_allclose(back, value(q), rtol=1e-7 if qtype == "nvfp4" else 1e-12)
        one = np.asarray(dequantize(compiled(x.astype(np.float32), qtype, **rows(qtype))))
        np.testing.assert_allclose(back, one, rtol=0.3, atol=np.abs(x).max() * 0.2)
        minmax = compiled(np.float64([[1e300, -1.0]]), "int8", method="minmax")
        assert minmax.zero_point.tolist() == [[0]]
        large = compiled(np.float64([1e40, 6e39]), "int8")
        assert large.qvalue.tolist() == [127, 76]


def scales(x, *args, by=quantize, **options):
    """The shape of the scales."""
    return jax.eval_shape(lambda x: by(x, *args, **options), x).scale.shape


def test_block_formats_need_their_tiles():
    x = jnp.ones((4, 64))
    for options in ({}, {1: 16}, {0: 4, 1: 32}, {0: 2, 1: 16}):
        with pytest.raises(ValueError, match="'mxfp8' must be of 32 elements"):
            quantize(x, "mxfp8", tile_axes=options)
    assert scales(x, "nvfp4", tile_axes={1: 16}) == (1, 4)
    # Whole axes, and a part of one more.
    assert scales(x.reshape(8, 2, 16), "mxfp8", tile_axes={1: 2, 2: 16}) == (1, 1, 1)
    assert scales(x.T, "nvfp4", tile_axes={0: 4, 1: 4}) == (16, 1)


@pytest.mark.slow
def test_a_float_tile_is_one_over_the_number_of_tiles():
    x = jnp.ones((4, 12))
    assert scales(x, "int8", tile_axes={1: 1 / 3}) == (1, 3)
    assert scales(x, "int8", tile_axes={1: 1.0}) == (1, 1)
    assert scales(x, "int8", tile_axes={1: 1}) == (1, 12)
    with pytest.raises(ValueError, match=r"tile size must be .* got 0\.2 \(3 elements\)"):
        quantize(jnp.ones((4, 13)), "int8", tile_axes={1: 0.2})


@pytest.mark.slow
def test_granularity_for_dots():
    x = jnp.ones((2, 64))
    for_dot = quantize_for_dot
    assert scales(x, (1,), "int8", by=for_dot, channelwise=False) == (1, 1)
    assert scales(x, (1,), "int8", 0.25, by=for_dot, channelwise=False) == (1, 4)
    assert scales(x, (1,), "mxfp4", by=for_dot) == (2, 2)
    points = jax.eval_shape(lambda x: for_dot(x, (1,), "int8", method="minmax"), x).zero_point
    assert points.shape == (2, 1)


@pytest.mark.slow
def test_quantize_with_saturates():
    x = jnp.array([300.0, -INF, NAN, 3.0])
    for qtype, want in (("int8", [127, -127, 0, 3]), ("float4_e2m1fn", [6, -6, 0, 3])):
        q = quantize_with(x, qtype, jnp.ones(1))
        assert q.qvalue.astype(jnp.float32).tolist() == want
    q = quantize_with(x, "int4", jnp.ones(1), jnp.array([-3], jnp.int4))
    assert q.qvalue.astype(jnp.int8).tolist() == [7, -8, 0, 0]
    assert math.isnan(quantize_with(x, "fp8", jnp.ones(1)).qvalue.astype(jnp.float32)[2])
    with pytest.raises(ValueError, match=r"scale must have the axes .* got shape \(3,\)"):
        quantize_with(x, "int8", jnp.ones(3))
    with pytest.raises(TypeError, match="scale must be float8_e8m0fnu"):
        quantize_with(jnp.ones(32), "mxfp4", jnp.ones(1))


@pytest.mark.parametrize("method", ["minmax", "fixed,-1,2"])
def test_only_integers_have_zero_points(method):
    with pytest.raises(ValueError, match="only integer qtypes have zero points"):
        quantize(jnp.ones(4), "fp8", method=method)
