"""dbias_quantize: numbers, against the reference and against NumPy."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import te_ffi_kernels as te
from jaxtap_testkit import examples
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te import formats as expected
from jaxtap_testkit.te.formats import raw
from te_ffi_kernels import QuantizeLayout, ScalingMode, reference

pytestmark = pytest.mark.sample(2)

FORMATS = st.sampled_from(list(expected.FORMATS))
FLOATS = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])
LAYOUTS = st.sampled_from(list(QuantizeLayout))
SIZES = st.sampled_from([0, 1, 15, 16, 17, 31, 33, 63, 64, 65, 127, 600])
BLOCKS = st.sampled_from([32, 64, 96, 160, 544])
REFERENCE = jax.jit(reference.dbias_quantize, static_argnums=range(6, 12))
MODES = [
    ScalingMode.DELAYED_TENSOR_SCALING,
    ScalingMode.CURRENT_TENSOR_SCALING,
    ScalingMode.MXFP8_1D_SCALING,
    ScalingMode.CHANNEL_SCALING,
]


def run(op, x, out, mode, layout, axis=-1, *, scale=37.5, amax=0.5, dbias=True):
    return op(
        x,
        jnp.full((1,), scale, jnp.float32),
        jnp.full((1,), amax, jnp.float32),
        jnp.zeros((0,), jnp.uint32),
        jnp.zeros((1,), jnp.float32),
        jnp.zeros((1, 1), jnp.bfloat16),
        out,
        mode,
        layout,
        axis,
        None,
        dbias,
    )


@st.composite
def problems(draw):
    mode, layout = draw(st.sampled_from(MODES)), draw(LAYOUTS)
    blocks = mode is ScalingMode.MXFP8_1D_SCALING
    out = draw(FORMATS.filter(lambda name: name != "int8") if blocks else FORMATS)
    rows = draw(BLOCKS if blocks and layout.has_colwise else SIZES)
    cols = draw(BLOCKS if blocks and layout.has_rowwise else SIZES)
    middle = draw(st.sampled_from([None, 1, 3]))
    shape, axis = (rows, cols), draw(st.sampled_from([1, -1]))
    if middle is not None:
        before = draw(st.booleans())
        shape = (middle, rows, cols) if before else (rows, middle, cols)
        axis = 2 if before else 1
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    x = rng.normal(size=shape) * draw(st.sampled_from([1e-20, 1e-3, 1.0, 30.0, 1e30]))
    x = x.astype(np.float32)
    for value in draw(
        st.lists(st.sampled_from([np.nan, np.inf, -np.inf, -0.0, 1e-40]), max_size=3)
    ):
        if x.size:
            x.reshape(-1)[rng.integers(x.size)] = value
    return jnp.asarray(x).astype(draw(FLOATS)), out, mode, layout, axis


@pytest.mark.slow
@examples(20)
@given(problems())
def test_kernel_and_reference_have_the_same_bits(problem):
    x, *_ = problem
    found, wanted = run(te.dbias_quantize, *problem), run(REFERENCE, *problem)
    for one, other in zip(found[:5], wanted[:5], strict=True):
        assert (one.shape, one.dtype) == (other.shape, other.dtype)
        np.testing.assert_array_equal(raw(one), raw(other))
    assert found[5].dtype == x.dtype
    near(found[5], wanted[5], x)


def near(sums, others, x):
    """Sums are in float32, in some order, rounded to x's dtype."""
    total = np.abs(np.nan_to_num(np.asarray(x, np.float64), posinf=0, neginf=0)).sum()
    step = float(jnp.finfo(x.dtype).eps)
    with np.errstate(over="ignore"):
        sums, others = np.asarray(sums, np.float32), np.asarray(others, np.float32)
    np.testing.assert_allclose(sums, others, rtol=2 * step, atol=1e-6 * total + 1e-37)


@pytest.mark.slow
@examples(20)
@given(problems())
def test_kernel_against_numpy(problem):
    x, out, mode, layout, axis = problem
    qvalue, colwise, scale_inv, colwise_inv, amax, dbias = run(te.dbias_quantize, *problem)
    axis %= x.ndim
    matrix = expected.flushed(x).reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))
    with np.errstate(invalid="ignore", over="ignore"):
        if mode is ScalingMode.MXFP8_1D_SCALING:
            make = lambda over: expected.mx(matrix, out, over)  # noqa: E731
        elif mode is ScalingMode.CHANNEL_SCALING:
            make = lambda over: expected.per_channel(matrix, out, over)  # noqa: E731
        else:
            inverse = np.float32([1 / np.float32(37.5)])
            make = lambda over: (expected.per_tensor(matrix, 37.5, out), inverse)  # noqa: E731
        if layout.has_rowwise:
            wanted, scales = make(1)
            np.testing.assert_array_equal(raw(qvalue).reshape(matrix.shape), raw(wanted))
            np.testing.assert_array_equal(raw(scale_inv).ravel(), raw(scales).ravel())
        if layout.has_colwise:
            wanted, scales = make(0)
            wanted = raw(wanted) if mode is ScalingMode.MXFP8_1D_SCALING else raw(wanted).T
            np.testing.assert_array_equal(raw(colwise).reshape(wanted.shape), wanted)
            np.testing.assert_array_equal(raw(colwise_inv).ravel(), raw(scales).ravel())
        largest = expected.absmax(matrix) if mode.is_tensor else 0
        assert float(amax[0]) == max(np.float32(0.5), np.float32(largest))
        near(dbias, matrix.astype(np.float64).sum(0).reshape(dbias.shape), x)


@pytest.mark.sample(1)
@pytest.mark.parametrize("out", list(expected.FORMATS))
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_half_precision_number(out, dtype):
    x = np.arange(2**16, dtype=np.uint16).view(np.dtype(dtype)).reshape(256, 256)
    found = run(
        te.dbias_quantize, jnp.asarray(x), out, 1, QuantizeLayout.ROWWISE, scale=1.0, dbias=False
    )
    np.testing.assert_array_equal(raw(found[0]), raw(expected.rounded(expected.flushed(x), out)))


@pytest.mark.parametrize("out", ["float8_e4m3fn", "float8_e5m2"])
def test_numbers_halfway_between_qvalue(out):
    qvalue = np.arange(0x7F if out == "float8_e4m3fn" else 0x7B, dtype=np.uint8)
    values = qvalue.view(expected.FORMATS[out]).astype(np.float64)
    halfway = (values[1:] + values[:-1]) / 2
    around = np.stack([np.nextafter(np.float32(halfway), np.float32(d)) for d in (0, 1e9)])
    x = np.concatenate([np.float32(halfway)[None], around]).astype(np.float32)
    found = run(te.dbias_quantize, jnp.asarray(x), out, 1, 0, scale=1.0, dbias=False)[0]
    np.testing.assert_array_equal(raw(found), raw(expected.rounded(x, out)))


@pytest.mark.slow
def test_amax_is_that_of_all_numbers_and_of_before():
    x = jnp.asarray([[1.0, -7.0, jnp.nan], [2.0, 3.0, -0.5]])
    assert run(te.dbias_quantize, x, "int8", 1, 2)[4] == 7
    assert run(te.dbias_quantize, x, "int8", 1, 2, amax=9.0)[4] == 9
    assert run(te.dbias_quantize, x, "int8", 1, 2, amax=jnp.nan)[4] == 7
    assert run(te.dbias_quantize, x.at[0, 0].set(jnp.inf), "int8", 3, 1)[4] == jnp.inf


def test_scales_from_amax():
    amax = jnp.asarray([4.0, 0.0, jnp.inf, jnp.nan, 2e-38, 1e38])
    found = te.compute_scale_from_amax(amax, jnp.float8_e4m3fn)
    most = jnp.finfo(jnp.float32).max
    np.testing.assert_allclose(found, [112, 1, 1, 1, most, 448 / 1e38], rtol=1e-6)
    found = te.compute_scale_from_amax(amax[:2], jnp.int8, margin=1.0, scale=jnp.asarray([5.0]))
    np.testing.assert_allclose(found, [127 / 8, 5])


def test_current_scaling_reaches_the_largest_code():
    x = normal(40, 50) * 3
    scale = te.compute_scale_from_amax(jnp.max(jnp.abs(x)).reshape(1), jnp.float8_e5m2)
    found = run(te.dbias_quantize, x, "float8_e5m2", 3, 2, scale=scale[0])
    assert np.abs(np.asarray(found[0], np.float32)).max() == 57344
    np.testing.assert_array_equal(raw(found[1]), raw(found[0]).T)


def test_an_infinity_in_a_block():
    x = jnp.ones((1, 64)).at[0, 3].set(jnp.inf).at[0, 4].set(2.0**127)
    qvalue, _, scales, *_ = run(te.dbias_quantize, x, "float8_e4m3fn", 2, 0)
    assert raw(scales).tolist() == [[254, 119]]
    numbers = np.asarray(qvalue, np.float32)[0]
    assert (numbers[3], numbers[4], numbers[5], numbers[40]) == (448, 1, 0, 256)


@pytest.mark.slow
@examples(15)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["float8_e4m3fn", "float8_e5m2", "int8"]),
    st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16]),
    st.sampled_from(MODES),
    st.booleans(),
)
@example(0, "int8", jnp.float32, ScalingMode.CHANNEL_SCALING, True)
def test_dequantize(seed, name, dtype, mode, by_column):
    if mode.is_mx and name == "int8":
        name = "float8_e4m3fn"
    rng = np.random.default_rng(seed)
    qvalue = rng.integers(0, 256, (96, 160)).astype(np.uint8).view(expected.FORMATS[name])
    if mode.is_mx:
        shape = (3, 160) if by_column else (96, 5)
        scales = rng.integers(0, 256, shape).astype(np.uint8)
        wide = np.ldexp(1.0, scales.astype(int) - 127)
        wide = np.where(scales == 255, np.nan, wide)
        wide = np.repeat(wide, 32, axis=0 if by_column else 1)
        scales = scales.view(expected.E8M0)
    elif mode is ScalingMode.CHANNEL_SCALING:
        scales = rng.uniform(0.01, 2, 96).astype(np.float32)
        wide = scales[:, None].astype(np.float64)
    else:
        scales = rng.uniform(0.01, 2, 1).astype(np.float32)
        wide = scales.astype(np.float64)
    zero = jnp.zeros((1,))
    args = (jnp.asarray(qvalue), zero, zero, jnp.asarray(scales), dtype, mode, by_column, -1)
    same = jax.jit(reference.dequantize, static_argnums=range(4, 8))(*args)
    found = te.dequantize(*args)
    np.testing.assert_array_equal(np.asarray(found, np.float32), np.asarray(same, np.float32))
    with np.errstate(invalid="ignore", over="ignore"):
        wanted = (qvalue.astype(np.float64) * wide).astype(np.float32).astype(np.dtype(dtype))
        tiny = np.abs(wanted.astype(np.float64)) < 2.0**-126
    got = np.where(tiny, 0, np.asarray(found).astype(np.float64))
    np.testing.assert_array_equal(got, np.where(tiny, 0, wanted.astype(np.float64)))


@pytest.mark.parametrize("name", list(expected.FORMATS))
def test_every_code(name):
    qvalue = np.arange(256, dtype=np.uint8).view(expected.FORMATS[name]).reshape(2, 128)
    one = jnp.ones((1,))
    found = te.dequantize(jnp.asarray(qvalue), one, one, one)
    np.testing.assert_array_equal(found, qvalue.astype(np.float32))


@pytest.mark.sample(1)
@pytest.mark.parametrize("mode", MODES)
def test_it_is_the_kernel_that_runs(mode):
    def both(x):
        out = run(te.dbias_quantize, x, jnp.float8_e4m3fn, mode, 2)
        return te.dequantize(out[0], out[4], out[4], out[2], jnp.float32, mode)

    x = jnp.ones((64, 64))
    text = jax.jit(both).lower(x).compile().as_text()
    for op in ("dbias_quantize", "dequantize"):
        assert f'custom_call_target="te_ffi_kernels.{op}"' in text
    np.testing.assert_allclose(both(x), x, rtol=0.07)


def test_modes_and_layouts_may_be_names():
    x = jnp.linspace(-1, 1, 32 * 64).reshape(32, 64)
    named = run(te.dbias_quantize, x, jnp.int8, "channel_scaling", "rowwise_colwise")
    numbered = run(te.dbias_quantize, x, jnp.int8, 64, 2)
    for one, other in zip(named, numbered, strict=True):
        np.testing.assert_array_equal(one, other)
    with pytest.raises(ValueError, match=r"q_layout must be one of: ROWWISE,.*got 'rows'"):
        run(te.dbias_quantize, x, jnp.int8, 64, "rows")


def test_scales_may_be_bytes():
    x = jnp.ones((32, 64))
    args = [x, *[jnp.ones((1,))] * 2, jnp.zeros((0,), jnp.uint32), jnp.ones((1,))]
    args += [jnp.zeros((1, 1), jnp.bfloat16), jnp.float8_e4m3fn, 2, 2, -1]
    as_bytes, as_e8m0 = (te.dbias_quantize(*args, d) for d in (jnp.uint8, jnp.float8_e8m0fnu))
    assert as_bytes[2].dtype == jnp.uint8
    for i in (2, 3):
        np.testing.assert_array_equal(raw(as_bytes[i]), raw(as_e8m0[i]))
    back = te.dequantize(as_bytes[1], *args[1:3], as_bytes[3], jnp.float32, 2, True)
    np.testing.assert_array_equal(back, x)


def test_large_matrices_take_the_way_past_the_caches():
    x = np.random.default_rng(0).normal(size=(2112, 2080)).astype(ml_dtypes.bfloat16)
    problem = (jnp.asarray(x), "int8", ScalingMode.DELAYED_TENSOR_SCALING, QuantizeLayout(2))
    found = run(te.dbias_quantize, *problem)
    wanted = expected.per_tensor(x.astype(np.float32), 37.5, "int8")
    np.testing.assert_array_equal(found[0], wanted)
    np.testing.assert_array_equal(found[1], wanted.T)
