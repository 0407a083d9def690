import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import te_ffi_kernels as te
from jaxtap_testkit import examples
from jaxtap_testkit.te.weights import matrix, quantized_rows, weight

pytestmark = pytest.mark.sample(2)

SIZES = st.sampled_from([1, 2, 3, 7, 15, 16, 17, 31, 33, 63, 64, 65, 127, 130])
ROWS = st.sampled_from([0, 1, 2, 3, 4, 5, 7, 8, 15, 16, 17, 33])
FLOATS = st.sampled_from([jnp.float32, jnp.bfloat16, jnp.float16])
WEIGHT_ONLY = {te.gemm_w8a16: 8, te.gemm_w4a16: 4}
QUANTIZED = {te.gemm_w8a8: 8, te.gemm_w4a8: 4}


@st.composite
def problems(draw, bits=8):
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    group = draw(st.sampled_from([0, 0, 8, 32, 96]))
    groups = draw(st.integers(2, 3)) if group else 1
    k = group * groups or draw(SIZES)
    x = rng.normal(size=(draw(ROWS), k)).astype(np.float32)
    x *= draw(st.sampled_from([1e-30, 1e-3, 1.0, 1e4]))
    return x, *weight(rng, k, draw(SIZES), bits, groups)


def packed(qvalue, scale, bits=8):
    pack = te.pack_w8 if bits == 8 else te.pack_w4
    return pack(jnp.asarray(qvalue), jnp.asarray(scale))


@pytest.mark.slow
@pytest.mark.parametrize("op", QUANTIZED)
@examples(12)
@given(st.data(), FLOATS, st.sampled_from([None, jnp.float32, jnp.bfloat16]))
def test_int8_is_exact_integer_arithmetic(op, data, dtype, out_dtype):
    x, qvalue, scale = data.draw(problems(QUANTIZED[op]))
    x = jnp.asarray(x).astype(dtype)
    y = op(x, packed(qvalue, scale, QUANTIZED[op]), out_dtype=out_dtype)
    assert y.dtype == (out_dtype or dtype)
    groups = scale.shape[0]
    in_groups = np.asarray(x, np.float32).reshape(len(x), groups, -1 if len(x) else 1)
    rows, row_scale = quantized_rows(in_groups)
    expected = np.zeros((len(x), qvalue.shape[1]), np.float32)
    for g, part in enumerate(np.split(qvalue.astype(np.int64), groups) if len(x) else ()):
        expected += (rows[:, g] @ part).astype(np.float32) * row_scale[:, g] * scale[g]
    np.testing.assert_array_equal(y, jnp.asarray(expected).astype(y.dtype))


def fixed_point_steps(x, scale):
    """Return what each number may be rounded by, twice over.

    Up to four rows have 23 bits of the largest magnitude of the row, more have 15 bits of that of
    each group of the weight, or of each 256 numbers where it has none.
    """
    m, k = x.shape
    groups = len(scale)
    size, bits = (k, 22) if m <= 4 else (k // groups if groups > 1 else 256, 14)
    most = [np.abs(x[:, i : i + size]).max(-1, initial=0) for i in range(0, k, size)]
    return np.repeat(np.stack(most, -1), size, -1)[:, :k] * 2.0**-bits


@pytest.mark.slow
@examples(12)
@given(st.data(), FLOATS)
def test_weight_only_beside_float64(data, dtype):
    op = data.draw(st.sampled_from(list(WEIGHT_ONLY)))
    bits = WEIGHT_ONLY[op]
    x, qvalue, scale = data.draw(problems(bits))
    x = jnp.asarray(x).astype(dtype)
    if bits == 4:
        scale = scale.astype(data.draw(st.sampled_from([np.float16, np.float32])))
    y = op(x, packed(qvalue, scale, bits), out_dtype=jnp.float32)
    full, wide = matrix(qvalue, scale), np.asarray(x, np.float64)
    error = np.abs(np.asarray(y, np.float64) - wide @ full)
    sums = 2.0**-21
    if te.isa() in ("amx", "avx512") and dtype == jnp.bfloat16 and bits == 4 and len(x) >= 16:
        sums += 2.0**-8  # weights may be rounded to bfloat16
    if jax.default_backend() == "gpu" and len(scale) > 1 and len(x) > 16 and dtype != jnp.float32:
        sums += 2.0**-8  # to the dtype of x
    bound = fixed_point_steps(wide, scale) @ np.abs(full) + sums * (np.abs(wide) @ np.abs(full))
    assert (error <= bound + 1e-44).all()


@pytest.mark.slow
@pytest.mark.parametrize("data", ["normal", "heavy-tailed", "outliers"])
@pytest.mark.parametrize(("bits", "group"), [(4, 32), (8, 0), (8, 128)])
def test_accuracy_of_the_formats(data, bits, group):
    """The table of docs/kernels.md: errors relative to the norm of what float64 makes."""
    rng = np.random.default_rng(10)
    k, n, m = 1024, 64, 24
    x = rng.standard_t(3, (m, k)) if data == "heavy-tailed" else rng.normal(size=(m, k))
    if data == "outliers":
        x[:, rng.choice(k, 2, replace=False)] *= 100
    x = x.astype(np.float32)
    qvalue, scale = weight(rng, k, n, bits, k // group if group else 1)
    w, exact = packed(qvalue, scale, bits), x.astype(np.float64) @ matrix(qvalue, scale)
    op, quantizing = (te.gemm_w4a16, te.gemm_w4a8) if bits == 4 else (te.gemm_w8a16, te.gemm_w8a8)

    def error(y):
        return np.linalg.norm(np.asarray(y, np.float64) - exact) / np.linalg.norm(exact)

    few = np.concatenate([op(jnp.asarray(x[i : i + 4]), w) for i in range(0, m, 4)])
    bounds = {"normal": 6e-5, "heavy-tailed": 2e-4, "outliers": 4e-4}
    assert error(few) < 5e-6
    assert error(op(jnp.asarray(x), w)) < bounds[data]
    assert error(quantizing(jnp.asarray(x), w)) < (1.5e-2 if data == "normal" else 0.2)


@pytest.mark.slow
@pytest.mark.parametrize("op", [*QUANTIZED, *WEIGHT_ONLY])
def test_reference_and_kernel_agree(op):
    bits = {**QUANTIZED, **WEIGHT_ONLY}[op]
    rng = np.random.default_rng(3)
    x = jnp.asarray(rng.normal(size=(9, 160)), jnp.float32)
    for groups in (1, 5):
        w = packed(*weight(rng, 160, 40, bits, groups), bits)
        ours, expected = op(x, w), getattr(te.reference, op.__name__)(x, w)
        off = 1e-4 * np.abs(expected).max() if op in WEIGHT_ONLY else 1e-4
        np.testing.assert_allclose(ours, expected, rtol=2e-6, atol=off)


def test_matmuls_take_leading_axes():
    rng = np.random.default_rng(4)
    w = packed(*weight(rng, 32, 20))
    x = jnp.asarray(rng.normal(size=(2, 3, 32)), jnp.float32)
    y = te.gemm_w8a8(x, w)
    assert y.shape == (2, 3, 20)
    np.testing.assert_array_equal(y.reshape(6, 20), te.gemm_w8a8(x.reshape(6, 32), w))
    assert te.gemm_w8a16(x[0, 0], w).shape == (20,)
    assert te.gemm_w8a8(x[:0], w).shape == (0, 3, 20)


def test_extremes_of_qvalue():
    """Every code at its largest: the sums that are closest to the end of int32."""
    k = 70_000
    qvalue = np.full((k, 3), -127, np.int8)
    x = jnp.full((2, k), -3.0)
    y = te.gemm_w8a8(x, packed(qvalue, np.ones((1, 3), np.float32)))
    scale = np.float32(3) / np.float32(127)
    np.testing.assert_array_equal(y, np.full((2, 3), np.float32(127 * 127 * k) * scale))
    lowest = packed(np.full((k, 3), -128, np.int8), np.ones((1, 3), np.float32))
    np.testing.assert_allclose(te.gemm_w8a16(x, lowest), np.full((2, 3), 384.0 * k), rtol=1e-6)


@pytest.mark.slow
def test_rows_of_zeros_and_of_extremes():
    w = packed(*weight(np.random.default_rng(5), 64, 8))
    small = packed(np.ones((64, 8), np.int8), np.full((1, 8), 1e-3, np.float32))
    for op in (te.gemm_w8a8, te.gemm_w8a16):
        np.testing.assert_array_equal(op(jnp.zeros((2, 64)), w), np.zeros((2, 8)))
        assert np.isfinite(op(jnp.full((2, 64), 1e-42), w)).all()
    # gemm_w8a8 rescales by one scale after the other, which passes the end of float32 here.
    large = jnp.full((2, 64), 3e38)
    np.testing.assert_allclose(te.gemm_w8a16(large, small), 3e38 * 0.064, rtol=1e-5)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("op", [*QUANTIZED, *WEIGHT_ONLY])
def test_a_bad_value_spoils_its_row_alone(op, bad):
    bits = {**QUANTIZED, **WEIGHT_ONLY}[op]
    qvalue, scale = weight(np.random.default_rng(6), 64, 20, bits)
    qvalue[qvalue == 0] = 1
    x = np.random.default_rng(7).normal(size=(5, 64)).astype(np.float32)
    clean = op(jnp.asarray(x), packed(qvalue, scale, bits))
    x[2, 17] = bad
    y = np.asarray(op(jnp.asarray(x), packed(qvalue, scale, bits)))
    assert not np.isfinite(y[2]).any()
    np.testing.assert_array_equal(np.delete(y, 2, 0), np.delete(np.asarray(clean), 2, 0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("op", [*QUANTIZED, *WEIGHT_ONLY])
def test_gradient_is_that_of_floats(op):
    bits = {**QUANTIZED, **WEIGHT_ONLY}[op]
    rng = np.random.default_rng(8)
    qvalue, scale = weight(rng, 64, 20, bits, groups=2)
    w = packed(qvalue, scale, bits)
    x, ct = (jnp.asarray(rng.normal(size=s), jnp.float32) for s in ((3, 64), (3, 20)))
    (grad,) = jax.vjp(lambda x: op(x, w), x)[1](ct)
    np.testing.assert_allclose(grad, np.asarray(ct) @ matrix(qvalue, scale).T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, w: (x.astype(jnp.int8), w), "x must.*got int8"),
        (lambda x, w: (x[:, :-1], w), "last axis of x must be 64"),
        (lambda x, w: (x, w.buffer), "must be a PackedWeight"),
        (
            lambda x, w: (x, te.pack_w4(jnp.zeros((64, 4), jnp.int8), jnp.ones((1, 4)))),
            "8 bits, got 4",
        ),
        (lambda x, w: (x, jax.tree.map(lambda b: b[None], w)), "stack"),
        (lambda x, w: (x, jax.tree.map(lambda b: b[:, :-1], w)), "is packed in uint8"),
    ],
)
def test_bad_input(change, message):
    x = jnp.ones((2, 64))
    w = packed(*weight(np.random.default_rng(9), 64, 20))
    with pytest.raises((TypeError, ValueError), match=rf"gemm_w8a8: .*{message}"):
        te.gemm_w8a8(*change(x, w))
    with pytest.raises(TypeError, match=r"out_dtype must.*got int32"):
        te.gemm_w8a8(x, w, out_dtype=jnp.int32)


DAMAGE = {
    "magic": (0, "JTWP"),
    "version": (4, "version|checksum"),
    "bits": (5, "checksum"),
    "columns": (6, "checksum"),
    "rows": (8, "checksum"),
    "group": (12, "checksum"),
    "header checksum": (24, "checksum"),
    "scale": (64, "checksum"),
    "code": (700, "checksum"),
}
ERRORS = (ValueError, jax.errors.JaxRuntimeError)


@pytest.mark.sample(1)
@pytest.mark.parametrize("what", DAMAGE)
@pytest.mark.parametrize("op", [te.gemm_w8a8, te.gemm_w8a16, te.gemm_w4a16])
def test_damaged_weights_are_refused(what, op):
    place, message = DAMAGE[what]
    # Another weight each time: what was checked at an address once is not checked again.
    bits = {**QUANTIZED, **WEIGHT_ONLY}[op]
    seed = [list(DAMAGE).index(what), list(WEIGHT_ONLY).index(op) if op in WEIGHT_ONLY else 9]
    w = packed(*weight(np.random.default_rng(seed), 64, 40, bits), bits)
    x = jnp.ones((2, 64))
    good = op(x, w)
    damaged = jax.tree.map(lambda b: b.at[1, place].set(b[1, place] ^ np.uint8(3)), w)
    with pytest.raises(ERRORS, match=rf"te_ffi_kernels\.{op.__name__}.*({message})"):
        jax.block_until_ready(op(x, damaged))
    np.testing.assert_array_equal(op(x, w), good)
