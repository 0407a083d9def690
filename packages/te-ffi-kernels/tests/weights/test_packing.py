import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import te_ffi_kernels as te
from jaxtap_testkit import examples
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te.weights import weight

pytestmark = pytest.mark.sample(2)

SIZES = st.sampled_from([1, 2, 7, 8, 15, 16, 17, 31, 33, 63, 64, 65, 100, 130])
PACKS = {8: te.pack_w8, 4: te.pack_w4}
REFERENCES = {8: te.reference.pack_w8, 4: te.reference.pack_w4}


@st.composite
def weights(draw):
    bits = draw(st.sampled_from([8, 4]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    group = draw(st.sampled_from([0, 0, 8, 24, 32, 64]))
    groups = draw(st.integers(2, 5)) if group else 1
    k = group * groups or draw(SIZES)
    qvalue, scale = weight(rng, k, draw(SIZES), bits, groups)
    if bits == 4:
        scale = scale.astype(draw(st.sampled_from([np.float16, np.float32])))
    return bits, group, qvalue, scale


@pytest.mark.slow
@examples(16)
@given(weights())
def test_the_bytes_of_the_reference_and_back(made):
    bits, group, qvalue, scale = made
    packed = PACKS[bits](jnp.asarray(qvalue), jnp.asarray(scale))
    np.testing.assert_array_equal(packed.buffer, REFERENCES[bits](qvalue, scale).buffer)
    assert (packed.bits, packed.group, packed.shape) == (bits, group, qvalue.shape)
    again, its_scale = packed.unpack()
    np.testing.assert_array_equal(again, qvalue)
    np.testing.assert_array_equal(its_scale, scale)
    assert its_scale.dtype == scale.dtype


def test_8_bits_by_hand():
    """A weight of 4 rows and 2 columns, byte by byte."""
    qvalue = np.array([[-128, 1], [127, -1], [0, 5], [-7, 64]], np.int8)
    scale = np.array([[0.5, 2.0]], np.float32)
    buffer = np.asarray(te.pack_w8(jnp.asarray(qvalue), jnp.asarray(scale)).buffer)
    assert buffer.shape == (1, 64 + 64 + 16 * 64)
    panel = buffer[0]
    assert panel[:8].tolist() == [*b"JTWP", 1, 8, 2, 0]
    assert panel[8:16].view(np.uint32).tolist() == [4, 0]
    words = panel[64:].view(np.uint32).astype(np.uint64)
    assert panel[16:24].view(np.uint32).tolist() == [
        words.sum() % 2**32,
        (words * np.arange(1, len(words) + 1, dtype=np.uint64)).sum() % 2**32,
    ]
    head = panel[:24].view(np.uint32).astype(np.uint64)
    assert panel[24:28].view(np.uint32)[0] == (head.sum() % 2**32) ^ 0x9E3779B9
    assert panel[64:128].view(np.float32).tolist() == [0.5, 2.0] + [0.0] * 14
    # Byte j of column c: row j.
    wide = qvalue.astype(int) + 128
    assert panel[128:136].tolist() == wide.T.reshape(-1).tolist()
    assert set(panel[136:].tolist()) == {128}


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_4_bits_by_hand(dtype):
    """Two groups of 32 rows and 2 columns: scales, quantized values, scales, quantized values."""
    rng = np.random.default_rng(3)
    qvalue = rng.integers(-8, 8, (64, 2)).astype(np.int8)
    # The largest and the least number of float16, and a subnormal one: stored as they are.
    scale = np.array([[65504, 6e-8], [1e-6, 0.1]], dtype)
    weight = te.pack_w4(jnp.asarray(qvalue), jnp.asarray(scale))
    panel = np.asarray(weight.buffer)[0]
    size = 32 * np.dtype(dtype).itemsize
    assert weight.nbytes == len(panel) == 64 + 2 * (size + 512)
    assert panel[:8].tolist() == [*b"JTWP", 2, 4, 2, size // 4]
    for g in range(2):
        at = 64 + g * (size + 512)
        expected = np.zeros(32, dtype)
        expected[:2] = scale[g]
        np.testing.assert_array_equal(panel[at : at + size].view(dtype), expected)
        lines = panel[at + size : at + size + 512].reshape(4, 32, 4)
        wide = (qvalue[32 * g : 32 * g + 32].astype(int) + 8).reshape(4, 2, 4, 2)
        # Byte j of column c in line i: row 8 * i + j in the low half, 8 * i + 4 + j in the high.
        np.testing.assert_array_equal(
            lines[:, :2], (wide[:, 0] | wide[:, 1] << 4).transpose(0, 2, 1)
        )
        assert set(lines[:, 2:].reshape(-1).tolist()) == {0x88}


def test_scales_of_float16_cost_half_a_bit_less():
    qvalue = jnp.zeros((1024, 64), jnp.int8)
    bits = {
        dtype: 8 * te.pack_w4(qvalue, jnp.ones((32, 64), dtype)).nbytes / qvalue.size
        for dtype in (jnp.float16, jnp.float32)
    }
    assert bits[jnp.float16] == pytest.approx(4.5, abs=0.02)
    assert bits[jnp.float32] == pytest.approx(5.0, abs=0.02)


@pytest.mark.parametrize(
    ("op", "dtype", "message"),
    [
        (te.pack_w8, jnp.float16, "pack_w8: scale must be float32.*got float16"),
        (te.pack_w4, jnp.bfloat16, "pack_w4: scale must be float32 or float16.*got bfloat16"),
    ],
)
def test_scales_that_there_are_not(op, dtype, message):
    with pytest.raises(TypeError, match=message):
        op(jnp.zeros((8, 4), jnp.int8), jnp.ones((1, 4), dtype))


@pytest.mark.slow
def test_a_stack_is_packed_layer_by_layer():
    rng = np.random.default_rng(0)
    made = [weight(rng, 40, 20) for _ in range(6)]
    qvalue, scale = (np.stack(x).reshape(2, 3, *x[0].shape) for x in zip(*made, strict=True))
    stack = te.pack_w8(jnp.asarray(qvalue), jnp.asarray(scale))
    assert stack.shape == (2, 3, 40, 20)
    for i, (one, its_scale) in enumerate(made):
        alone = te.pack_w8(jnp.asarray(one), jnp.asarray(its_scale))
        np.testing.assert_array_equal(stack.buffer[i // 3, i % 3], alone.buffer)
    np.testing.assert_array_equal(stack.unpack()[0], qvalue)


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [np.s_[1:2], np.s_[2:4]])
def test_a_slice_of_panels_is_a_weight(rows):
    qvalue, scale = weight(np.random.default_rng(1), 64, 64)
    whole = te.pack_w8(jnp.asarray(qvalue), jnp.asarray(scale))
    columns = slice(16 * rows.start, 16 * rows.stop)
    part = te.PackedWeight(whole.buffer[rows], 64, columns.stop - columns.start, 8, 0)
    x = normal(3, 64)
    y = te.gemm_w8a8(x, whole)
    np.testing.assert_array_equal(te.gemm_w8a8(x, part), y[:, columns])


@pytest.mark.parametrize(
    ("qvalue", "scale", "message"),
    [
        (jnp.zeros((4, 4), jnp.int16), jnp.ones((1, 4)), "pack_w8: qvalue must.*got int16"),
        (jnp.zeros((4, 4), jnp.int8), jnp.ones((1, 4), jnp.bfloat16), "scale must.*got bfloat16"),
        (jnp.zeros((4, 4), jnp.int8), jnp.ones(4), r"\[\*lead, groups, n\]"),
        (jnp.zeros((4, 4), jnp.int8), jnp.ones((1, 5)), "scale must have shape"),
        (jnp.zeros((0, 4), jnp.int8), jnp.ones((1, 4)), "must have a row"),
        (jnp.zeros((24, 4), jnp.int8), jnp.ones((2, 4)), "groups of 12 rows"),
        (jnp.zeros((24, 4), jnp.int8), jnp.ones((5, 4)), "divides the 24 rows"),
    ],
)
def test_bad_input(qvalue, scale, message):
    with pytest.raises((TypeError, ValueError), match=message):
        te.pack_w8(qvalue, scale)


def test_qvalue_beyond_4_bits():
    with pytest.raises(
        (ValueError, jax.errors.JaxRuntimeError),
        match=r"pack_w4.*quantized values must be in",
    ):
        jax.block_until_ready(te.pack_w4(jnp.full((8, 4), 8, jnp.int8), jnp.ones((1, 4))))
