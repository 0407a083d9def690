import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from jaxtap_testkit import examples
from quant_numerics import StochasticRounding, dequantize, get_qtype, quantize, quantize_for_dot

pytestmark = pytest.mark.sample(2)

INF, NAN = float("inf"), float("nan")
TINY = float(jnp.finfo(jnp.float32).tiny)
FINITE = st.floats(-(2.0**100), 2.0**100, width=32, allow_subnormal=False)


@st.composite
def cases(draw):
    """An array with, for each axis, nothing, "channel" or a tile size; and a qtype."""
    x = draw(hnp.arrays(np.float32, hnp.array_shapes(min_dims=0, max_dims=3), elements=FINITE))
    kinds = {}
    for axis, size in enumerate(x.shape):
        divisors = [t for t in range(1, size + 1) if size % t == 0]
        kinds[axis] = draw(st.sampled_from([None, "channel", *divisors]))
    return x, kinds, draw(st.sampled_from(["int8", "int4"]))


def axes(kinds):
    return {
        "channel_axes": [a for a, k in kinds.items() if k == "channel"],
        "tile_axes": {a: k for a, k in kinds.items() if isinstance(k, int)},
    }


def compiled(x, qtype, **options):
    """quantize under jit: one compilation instead of one per operation."""
    return jax.jit(lambda x: quantize(x, qtype, **options))(x)


def expand(scale, shape):
    """Scale per element, by repetition."""
    for axis, size in enumerate(shape):
        scale = np.repeat(scale, size // scale.shape[axis], axis=axis)
    return scale


@pytest.mark.slow
@examples(30)
@given(cases())
def test_scale_and_qvalue_follow_their_definition(case):
    x, kinds, qtype = case
    q = compiled(x, qtype, **axes(kinds))
    qmax = get_qtype(qtype).qmax
    expected_shape = [
        n if kinds[a] == "channel" else n // kinds[a] if kinds[a] else 1
        for a, n in enumerate(x.shape)
    ]
    assert (q.shape, q.dtype, q.scale.dtype) == (x.shape, jnp.float32, jnp.float32)
    assert list(q.scale.shape) == expected_shape

    scale = np.asarray(q.scale)
    for index in np.ndindex(*scale.shape):
        where = tuple(
            slice(i * (n // s), (i + 1) * (n // s))
            for i, n, s in zip(index, x.shape, scale.shape, strict=True)
        )
        absmax = np.abs(x[where]).max()
        want = max(absmax / qmax, TINY)
        np.testing.assert_allclose(scale[index], want, rtol=3e-7)
    per_element = expand(scale, x.shape)
    qvalue = np.clip(np.rint(x / per_element), -qmax, qmax)
    np.testing.assert_array_equal(np.asarray(q.qvalue).astype(np.float32), qvalue)


@pytest.mark.slow
@examples(30)
@given(cases())
def test_dequantized_values_are_within_half_a_step(case):
    x, kinds, qtype = case
    q = compiled(x, qtype, **axes(kinds))
    step = expand(np.asarray(q.scale), x.shape)
    assert np.all(np.abs(np.asarray(jax.jit(dequantize)(q)) - x) <= step * np.float32(0.5 + 1e-4))


def test_halves_round_to_even():
    x = jnp.array([127, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], jnp.float32)
    assert quantize(x, "int8").qvalue.tolist() == [127, 0, 2, 2, 0, -2, -2]


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["int8", "int4"])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_qvalue_come_back_exactly_in_every_dtype(qtype, dtype):
    qmax = get_qtype(qtype).qmax
    x = jnp.arange(-qmax, qmax + 1, dtype=jnp.float32).astype(dtype)
    q = compiled(x, qtype)
    assert q.dtype == dtype
    assert q.scale.tolist() == [1.0]
    assert jnp.array_equal(dequantize(q), x)


def test_float64_is_scaled_in_float64():
    with jax.enable_x64(True):
        x = jnp.array([[1e-3, 1 / 3, 1e40, -1.0]], jnp.float64)
        q = compiled(x, "int8", channel_axes=(1,))
        assert (q.dtype, q.scale.dtype) == (jnp.float64, jnp.float32)
        assert q.qvalue.tolist() == [[127, 127, 127, -127]]
        np.testing.assert_allclose(dequantize(q), x, rtol=1e-7)
        beyond = compiled(jnp.array([1e300, 1e-300], jnp.float64), "int8", channel_axes=(0,))
        assert beyond.scale.tolist() == [INF, pytest.approx(TINY)]
        assert beyond.qvalue.tolist() == [127, 0]


ROWS = {
    "zeros": ([0.0, -0.0, 0.0], TINY, [0, 0, 0]),
    "tiny": ([4 * TINY, -TINY, 0.0], TINY, [4, -1, 0]),
    "subnormal": ([TINY / 4, 0.0, 0.0], None, [0, 0, 0]),
    "inf": ([INF, -INF, 3.0], INF, [127, -127, 0]),
    "nan": ([NAN, 3.0, -1.0], NAN, [0, 0, 0]),
    "nan and inf": ([NAN, -INF, 1.0], NAN, [0, 0, 0]),
    "huge": ([3e38, -3e38, 0.0], 3e38 / 127, [127, -127, 0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("fn", [quantize, compiled])
def test_special_slices(fn):
    x = np.array([row for row, _, _ in ROWS.values()], np.float32)
    q = fn(x, "int8", channel_axes=(0,))
    scale, back = np.asarray(q.scale), np.asarray(dequantize(q))
    for i, (row, want, qvalue) in enumerate(ROWS.values()):
        assert q.qvalue[i].tolist() == qvalue
        if want is not None:
            np.testing.assert_allclose(scale[i, 0], want, rtol=1e-6)
        # All of a slice is non-finite, or none of it.
        assert np.isfinite(back[i]).tolist() == [np.isfinite(row).all()] * 3


@pytest.mark.slow
def test_infinities_dequantize_to_themselves():
    x = jnp.array([INF, 1.0, -INF], jnp.float32)
    back = dequantize(quantize(x, "int4"))
    assert back[0] == INF
    assert jnp.isnan(back[1])
    assert back[2] == -INF


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_the_largest_value_of_a_narrow_dtype_survives(dtype):
    x = jnp.array([float(jnp.finfo(dtype).max), 0.0], dtype)
    assert jnp.array_equal(dequantize(quantize(x, "int8")), x)


@pytest.mark.parametrize(
    ("shape", "channels", "tiles", "scale_shape"),
    [
        ((0,), (), {}, (1,)),
        ((0, 3), (), {}, (1, 1)),
        ((0, 3), (1,), {}, (1, 3)),
        ((0, 3), (0,), {}, (0, 1)),
        ((2, 0), (0,), {1: 4}, (2, 0)),
    ],
)
def test_arrays_of_size_zero(shape, channels, tiles, scale_shape):
    q = compiled(jnp.zeros(shape), "int8", channel_axes=channels, tile_axes=tiles)
    assert q.scale.shape == scale_shape
    assert jnp.all(q.scale == TINY)
    assert dequantize(q).shape == shape


def test_negative_axes_count_from_the_end():
    x = np.random.default_rng(0).normal(size=(2, 4, 6)).astype(np.float32)
    a = compiled(x, "int8", channel_axes=(-3,), tile_axes={-1: 2})
    b = compiled(x, "int8", channel_axes=(0,), tile_axes={2: 2})
    assert a.scale.shape == b.scale.shape == (2, 1, 3)
    assert jnp.array_equal(a.qvalue, b.qvalue)


@pytest.mark.parametrize("tile", [0, -2, 0.7])
def test_a_tile_must_be_positive_and_a_fraction_must_divide(tile):
    with pytest.raises(ValueError, match=rf"tile size must be .* divides 6, got {tile}"):
        quantize(jnp.ones((2, 6)), "int8", tile_axes={1: tile})


@pytest.mark.parametrize(
    "options",
    [
        {"channel_axes": (0, 0)},
        {"channel_axes": (0, -2)},
        {"channel_axes": (1,), "tile_axes": {1: 2}},
        {"tile_axes": {1: 2, -1: 3}},
    ],
)
def test_an_axis_is_named_once(options):
    with pytest.raises(ValueError, match="must all be different"):
        quantize(jnp.ones((2, 6)), "int8", **options)


@pytest.mark.parametrize("options", [{"channel_axes": (2,)}, {"tile_axes": {-3: 1}}])
def test_an_axis_must_exist(options):
    with pytest.raises(ValueError, match=r"an axis of shape \(2, 6\) must be from -2 to 1"):
        quantize(jnp.ones((2, 6)), "int8", **options)


def test_integers_are_not_quantized():
    with pytest.raises(TypeError, match=r"the array to quantize must have one of .* got int32"):
        quantize(jnp.ones((2, 6), jnp.int32), "int8")


def test_vmap_is_a_channel_axis():
    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    mapped = jax.jit(jax.vmap(lambda x: quantize(x, "int8", channel_axes=(1,))))(x)
    whole = compiled(x, "int8", channel_axes=(0, 2))
    assert mapped.scale.shape == whole.scale.shape
    assert jnp.array_equal(mapped.qvalue, whole.qvalue)


@pytest.mark.slow
def test_dequantize_is_differentiable_in_the_scale():
    q = quantize(jnp.array([[1.0, -2.0], [0.5, 4.0]]), "int8", channel_axes=(0,))

    def total(scale):
        return dequantize(type(q)(q.qvalue, scale, qtype=q.qtype, dtype=q.dtype)).sum()

    np.testing.assert_array_equal(
        jax.grad(total)(q.scale), q.qvalue.astype(jnp.float32).sum(1, keepdims=True)
    )


def test_quantize_for_dot_scales_all_that_is_not_contracted():
    def scale_shape(*args):
        x = jax.ShapeDtypeStruct((2, 8, 3, 6), jnp.float32)
        return jax.eval_shape(lambda x: quantize_for_dot(x, *args), x).scale.shape

    assert scale_shape((1, 3), "int8") == (2, 1, 3, 1)
    assert scale_shape((3, 1), "int8", 4) == (2, 2, 3, 6)
    assert scale_shape((1, -1), "int4", 3) == (2, 8, 3, 2)
    assert scale_shape((1, 3), "int4", 12) == (2, 4, 3, 1)
    assert scale_shape((), "int8") == (2, 8, 3, 6)


@pytest.mark.parametrize(
    ("qtype", "tiles"),
    [("int8", {0: 4}), ("int4", {0: 3, 1: 5}), ("mxfp8", {0: 32}), ("nvfp4", {0: 16})],
)
def test_an_axis_of_one_element_may_have_tiles(qtype, tiles):
    x = np.asarray([[1.5, -0.25, 3.0, 0.5, 2.0, -1.0]], np.float32)
    q = quantize(x, qtype, tile_axes=tiles)
    assert (q.shape, q.scale.shape) == (x.shape, (1, 2 if 1 in tiles else 1))
    limit = {"int8": 0.012, "int4": 0.22, "mxfp8": 0.1, "nvfp4": 0.26}[qtype]
    np.testing.assert_allclose(dequantize(q), x, atol=limit)


def test_quantize_for_dot_needs_an_axis_to_tile():
    with pytest.raises(ValueError, match=r"tile_size must be None where no axis .* got 4"):
        quantize_for_dot(jnp.ones((2, 4)), (), "int8", 4)


def balanced_in_numpy(x, steps):
    """Round columns to ``steps`` on each side, then move what is farthest until errors cancel."""
    scale = np.abs(x).max(0) / steps
    scale = np.where(scale == 0, 1, scale)
    found = np.round(x / scale)
    for column in range(x.shape[1]):
        error = found[:, column] - x[:, column] / scale[column]
        count = round(error.sum())
        moved = np.argsort(-error * np.sign(count), kind="stable")[: abs(count)]
        found[moved, column] -= np.sign(count)
    return found


@pytest.mark.parametrize(("qtype", "steps"), [("int8", 127), ("int4", 7)])
def test_balanced_errors_of_a_channel_cancel(qtype, steps):
    x = np.random.default_rng(7).normal(size=(25, 40)).astype(np.float32)
    x[:, 3] = np.arange(25) % 3 + 0.5  # equal errors: the first of them are moved
    x[:, 5] = 0
    run = jax.jit(lambda x: quantize(x, qtype, channel_axes=(1,), method="balanced"))
    q = run(x)
    np.testing.assert_array_equal(q.scale, quantize(x, qtype, channel_axes=(1,)).scale)
    got = np.asarray(q.qvalue.astype(jnp.int32))
    np.testing.assert_array_equal(got, balanced_in_numpy(x.astype(np.float64), steps))
    error = got - x / np.asarray(q.scale)
    assert np.abs(error).max() < 1
    assert np.abs(error.sum(0)).max() < 0.501
    # Of the same elements in other places, and in tiles.
    windows = x.reshape(5, 5, 1, 40)
    other = quantize(windows, qtype, channel_axes=(3,), method="balanced")
    np.testing.assert_array_equal(other.qvalue.reshape(25, 40), q.qvalue)
    tiled = quantize(x, qtype, channel_axes=(1,), tile_axes={0: 10}, method="balanced")
    last = quantize(x[20:], qtype, channel_axes=(1,), method="balanced")
    np.testing.assert_array_equal(tiled.qvalue[20:], last.qvalue)


def test_balanced_is_for_integers_and_keeps_what_is_not_finite():
    x = jnp.asarray([[1.0, jnp.nan, 0.3], [jnp.inf, 2.0, 0.7]])
    kept, plain = (quantize(x, "int8", channel_axes=(1,), method=m) for m in ("balanced", "absmax"))
    np.testing.assert_array_equal(kept.scale, plain.scale)
    np.testing.assert_array_equal(kept.qvalue[:, :2], plain.qvalue[:, :2])
    with pytest.raises(ValueError, match="must be an integer one"):
        quantize(x, "nf4", method="balanced")
    with pytest.raises(ValueError, match="takes no number"):
        quantize(x, "int8", method="balanced,2")
    with pytest.raises(ValueError, match="rounding must be None"):
        quantize(x, "int8", method="balanced", rounding=StochasticRounding(jax.random.key(0)))
