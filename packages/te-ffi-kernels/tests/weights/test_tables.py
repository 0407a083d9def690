"""Weights in 4 bits that are places in a table: float4, IQ4_NL and nf4."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.numbers import normal
from jaxtap_testkit.te.weights import KINDS, NUMBERS, table_weight
from te_ffi_kernels import reference

pytestmark = pytest.mark.sample(2)

NF4_ERROR = 8e-6
"""Of a number of nf4, which kernels have in 16 bits."""


@pytest.fixture(params=KINDS, ids=lambda kind: "-".join(kind))
def kind(request):
    return request.param


def made(kind, k=96, n=70, groups=6, seed=0):
    args, given, matrix = table_weight(np.random.default_rng(seed), k, n, groups, *kind)
    return te.pack_w4(*args, **given), matrix


def close(found, x, matrix, slack):
    """Within `slack` of the magnitudes that are summed, beside what nf4 is rounded by."""
    x = np.asarray(x, np.float64)
    expected, magnitude = x @ matrix, np.abs(x) @ np.abs(matrix)
    bound = (slack + 4 * NF4_ERROR) * magnitude + 1e-6 * np.abs(x).sum(-1, keepdims=True)
    assert (np.abs(np.asarray(found, np.float64) - expected) <= bound).all()


def test_the_bytes_of_the_reference_and_back(kind):
    for k, n, groups in ((96, 70, 6), (48, 3, 6), (64, 33, 2), (192, 32, 12)):
        args, given, _ = table_weight(np.random.default_rng(1), k, n, groups, *kind)
        packed = te.pack_w4(*args, **given)
        assert packed.nbytes % 64 == 0
        np.testing.assert_array_equal(packed.buffer, reference.pack_w4(*args, **given).buffer)
        for found, expected in zip(
            packed.unpack(), (*args, *list(given.values())[1:]), strict=True
        ):
            assert found.dtype == expected.dtype
            np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("rows", [1, 3, 40])
def test_float_activations(kind, rows):
    weight, matrix = made(kind)
    for dtype, slack in ((jnp.float32, 1e-4), (jnp.bfloat16, 1e-2)):
        x = normal(rows, 96, dtype=dtype)
        close(te.gemm_w4a16(x, weight, out_dtype=jnp.float32), x, matrix, slack)
        expected = reference.gemm_w4a16(x, weight, out_dtype=jnp.float32)
        close(expected, x, matrix, slack)


@pytest.mark.parametrize("rows", [1, 5])
def test_int8_activations_have_the_bits_of_the_reference(kind, rows):
    # In groups of more than four times the rows: else the reference sums floats.
    for k, groups in ((96, 4), (64, 2), (256, 4)):
        weight, matrix = made(kind, k=k, groups=groups)
        x = normal(rows, k)
        found = te.gemm_w4a8(x, weight)
        np.testing.assert_array_equal(found, jax.jit(reference.gemm_w4a8)(x, weight))
        close(found, x, matrix, 2e-2)


def test_rows_and_columns(kind):
    weight, matrix = made(kind)
    indices = jnp.array([0, 69, -1, 31], jnp.int32)
    for axis, expected in ((1, matrix.T), (0, matrix)):
        at = jnp.minimum(indices, expected.shape[0] - 1)
        found = te.packed_take(weight, at, axis=axis)
        np.testing.assert_array_equal(found, reference.packed_take(weight, at, axis=axis))
        wanted = expected[np.asarray(at)]
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=NF4_ERROR * abs(matrix).max())


def test_stacks_and_gradients(kind):
    layers = [table_weight(np.random.default_rng(i), 64, 40, 4, *kind) for i in range(3)]
    args, given, matrices = zip(*layers, strict=True)
    stacked = [jnp.stack(part) for part in zip(*args, strict=True)]
    more = {"table": kind[0]}
    if "column_scale" in given[0]:
        more["column_scale"] = jnp.stack([one["column_scale"] for one in given])
    stack, x = te.pack_w4(*stacked, **more), normal(3, 64)
    assert stack.shape == (3, 64, 40)
    run = jax.jit(lambda x, i: te.gemm_w4a16(x, stack, index=i))
    for i in range(3):
        close(run(x, i), x, matrices[i], 1e-4)
    found = te.gemm_w4a8(x, stack, group_sizes=jnp.array([1, 0, 2]))
    for row, layer in enumerate((0, 2, 2)):
        close(found[row], np.asarray(x)[row], matrices[layer], 2e-2)
    ct = normal(3, 40, seed=1)
    grad = jax.grad(lambda x: (te.gemm_w4a16(x, stack, index=1) * ct).sum())(x)
    close(grad, ct, matrices[1].T, 1e-4)


def test_a_scale_that_is_nan_makes_its_column_nan():
    args, given, _ = table_weight(np.random.default_rng(0), 64, 40, 4, "e2m1", "float8_e4m3fn")
    scale = args[1].at[2, 7].set(jnp.nan)
    weight = te.pack_w4(args[0], scale, **given)
    for fn in (te.gemm_w4a16, te.gemm_w4a8):
        for rows in (1, 20):
            found = np.isnan(np.asarray(fn(normal(rows, 64), weight)))
            assert found[:, 7].all()
            assert not np.delete(found, 7, 1).any()


def test_e8m0_at_its_ends():
    places = jnp.full((32, 3), 2, jnp.int8)  # 1
    scale = jnp.array([[2.0**-100, 2.0**100, jnp.nan]]).astype(jnp.float8_e8m0fnu)
    weight = te.pack_w4(places, scale, table="e2m1")
    found = te.gemm_w4a16(jnp.ones((1, 32)), weight)[0]
    np.testing.assert_allclose(found[:2], [32 * 2.0**-100, 32 * 2.0**100], rtol=1e-6)
    assert np.isnan(found[2])


def test_bits_of_a_weight():
    places = jnp.zeros((1024, 64), jnp.int8)
    for dtype, groups, bits in (("float8_e8m0fnu", 32, 4.25), ("float8_e4m3fn", 64, 4.5)):
        more = {"column_scale": jnp.ones(64)} if groups == 64 else {}
        scale = jnp.ones((groups, 64)).astype(dtype)
        packed = te.pack_w4(places, scale, table="e2m1", **more)
        assert 8 * packed.nbytes / places.size == pytest.approx(bits, abs=0.1)


ONES, PLACES = jnp.ones((2, 4)), jnp.zeros((16, 4), jnp.int8)


@pytest.mark.parametrize(
    ("args", "given", "error", "message"),
    [
        ((PLACES, ONES), {"table": "nf3"}, ValueError, "table must be one of int4, e2m1, iq4_nl, "),
        ((PLACES, ONES[:1]), {"table": "nf4"}, ValueError, "nf4 must have more than one group"),
        ((PLACES, ONES.astype(jnp.float8_e8m0fnu)), {}, TypeError, "got float8_e8m0fnu"),
        (
            (PLACES, ONES.astype(jnp.float8_e4m3fn)),
            {"table": "nf4"},
            TypeError,
            "got float8_e4m3fn",
        ),
        (
            (PLACES, ONES.astype(jnp.float8_e4m3fn)),
            {"table": "e2m1"},
            ValueError,
            "column_scale must be given",
        ),
        (
            (PLACES, ONES),
            {"table": "e2m1", "column_scale": jnp.ones(4)},
            ValueError,
            "column_scale must be given with scales in float8_e4m3fn, and only then",
        ),
        (
            (PLACES, ONES.astype(jnp.float8_e4m3fn)),
            {"table": "e2m1", "column_scale": jnp.ones(3)},
            ValueError,
            r"column_scale must be float32\[4\], got float32\[3\]",
        ),
        ((PLACES.astype(jnp.int4), ONES), {"table": "nf4"}, TypeError, "int8 or uint4, got int4"),
    ],
)
def test_bad_input(args, given, error, message):
    with pytest.raises(error, match=message):
        te.pack_w4(*args, **given)


def test_places_beyond_the_table():
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match=r"in \[0, 15\], got -1"):
        jax.block_until_ready(te.pack_w4(PLACES - 1, ONES, table="nf4"))


def test_a_weight_of_another_table_is_refused():
    weight, _ = made(("iq4_nl", "float16"))
    other = te.PackedWeight(weight.buffer, 96, 70, 4, 16, "float16", "nf4")
    with pytest.raises((ValueError, jax.errors.JaxRuntimeError), match="kind of scale and table"):
        jax.block_until_ready(te.gemm_w4a16(normal(1, 96), other))


def test_tables_are_the_formats_of_the_numerics():
    for table, numbers in NUMBERS.items():
        found = te.pack_w4(
            jnp.arange(16, dtype=jnp.int8)[:, None], jnp.ones((2, 1)), table=table
        ).integers()
        np.testing.assert_allclose(
            np.asarray(found[0], np.float64)[:, 0] * float(found[1][0, 0]), numbers, atol=NF4_ERROR
        )
