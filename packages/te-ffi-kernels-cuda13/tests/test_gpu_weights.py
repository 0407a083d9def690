"""Matmuls with packed weights on a GPU: the tests of the CPU, and what is otherwise there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtap_testkit.te.cpu_tests.weights.test_matmuls import (  # noqa: F401
    WEIGHT_ONLY,
    packed,
    test_a_bad_value_spoils_its_row_alone,
    test_bad_input,
    test_extremes_of_qvalue,
    test_gradient_is_that_of_floats,
    test_matmuls_take_leading_axes,
    test_reference_and_kernel_agree,
    test_weight_only_beside_float64,
)
from jaxtap_testkit.te.cpu_tests.weights.test_packing import (  # noqa: F401
    test_4_bits_by_hand,
    test_8_bits_by_hand,
    test_a_slice_of_panels_is_a_weight,
    test_a_stack_is_packed_layer_by_layer,
    test_the_bytes_of_the_reference_and_back,
)

import te_ffi_kernels as te
from jaxtap_testkit.te.calls import told
from jaxtap_testkit.te.on_gpu import marks
from jaxtap_testkit.te.weights import matrix, quantized_rows, weight

pytestmark = marks


BITS = {te.gemm_w8a8: 8, te.gemm_w4a8: 4, **WEIGHT_ONLY}


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("rows", [1, 16, 17])
@pytest.mark.parametrize("op", BITS)
def test_it_is_the_kernel_that_runs(op, rows, groups):
    bits = BITS[op]
    w = packed(*weight(np.random.default_rng(), 64, 40, bits, groups), bits)
    text = jax.jit(lambda x: op(x, w)).lower(jnp.ones((rows, 64))).compile().as_text()
    assert f'custom_call_target="te_ffi_kernels.{op.__name__}"' in text


@pytest.mark.parametrize("op", [te.pack_w8, te.pack_w4])
def test_packing_is_a_kernel(op):
    given = jnp.zeros((64, 40), jnp.int8), jnp.ones((1, 40))
    text = jax.jit(lambda *given: op(*given).buffer).lower(*given).compile().as_text()
    assert f'custom_call_target="te_ffi_kernels.{op.__name__}"' in text


def test_qvalue_beyond_4_bits_wrap_around():
    """As in the reference: an error can't be raised, since nobody waits for the device."""
    qvalue, scale = jnp.arange(-128, 128, dtype=jnp.int8).reshape(16, 16), jnp.ones((1, 16))
    found = te.pack_w4(qvalue, scale).buffer
    np.testing.assert_array_equal(found, te.reference.pack_w4(qvalue, scale).buffer)


@pytest.mark.sample(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("op", [te.gemm_w8a8, te.gemm_w4a8])
@pytest.mark.parametrize(
    ("rows", "k", "n", "groups"),
    [
        *((rows, 96, 40, 1) for rows in (*range(1, 34), 64, 65, 128, 257)),
        (300, 192, 129, 1),
    ],
)
def test_sums_of_int8_are_exact(rows, k, n, groups, op, dtype):
    rng = np.random.default_rng(1)
    qvalue, scale = weight(rng, k, n, BITS[op], groups)
    x = jnp.asarray(rng.normal(size=(rows, k)), dtype)
    y = op(x, packed(qvalue, scale, BITS[op]))
    of_x, row_scale = quantized_rows(np.asarray(x, np.float32).reshape(rows, groups, -1))
    expected = np.zeros((rows, n), np.float32)
    for g, part in enumerate(np.split(qvalue.astype(np.int64), groups)):
        expected += (of_x[:, g] @ part).astype(np.float32) * row_scale[:, g] * scale[g]
    np.testing.assert_array_equal(y, jnp.asarray(expected).astype(dtype))


def of_products(op, rows, groups, dtype):
    """How far a product may be away: many rows of a weight with groups have 16 bits."""
    quantizes = op in (te.gemm_w8a8, te.gemm_w4a8)
    if groups == 1 or rows <= 16 or (dtype == jnp.float32 and not quantizes):
        return 3e-5  # tensor cores add up fewer digits than float32 has
    return (1 + quantizes) * (2.0**-11 if dtype == jnp.float16 else 2.0**-8)


@pytest.mark.parametrize("out_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("rows", "k", "n", "groups"),
    [
        (9, 33, 40, 1),
        (257, 33, 40, 1),
        (300, 192, 129, 1),
        (9, 64, 40, 2),
        (65, 64, 40, 2),
        (200, 192, 129, 3),
        (130, 2112, 64, 3),
    ],
)
@pytest.mark.parametrize("op", BITS)
def test_many_rows_beside_float64(op, rows, k, n, groups, dtype, out_dtype):
    bits = BITS[op]
    rng = np.random.default_rng(2)
    qvalue, scale = weight(rng, k, n, bits, groups)
    x = jnp.asarray(rng.normal(size=(rows, k)), dtype)
    y = np.asarray(op(x, packed(qvalue, scale, bits), out_dtype=out_dtype), np.float64)
    wide, full = np.asarray(x, np.float64), matrix(qvalue, scale)
    if op not in WEIGHT_ONLY:
        of_x, row_scale = quantized_rows(np.asarray(x, np.float32).reshape(rows, groups, -1))
        wide = (of_x * np.asarray(row_scale, np.float64)).reshape(rows, k)
    exact, size = wide @ full, np.abs(wide) @ np.abs(full)
    of_result = np.abs(exact) * (2.0**-8 if out_dtype == jnp.bfloat16 else 0)
    assert (np.abs(y - exact) <= of_products(op, rows, groups, dtype) * size + of_result).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("op", BITS)
def test_a_bad_value_spoils_its_row_alone_of_many(op, groups, bad):
    bits = BITS[op]
    qvalue, scale = weight(np.random.default_rng(3), 64, 20, bits, groups)
    qvalue[qvalue == 0] = 1
    w = packed(qvalue, scale, bits)
    x = np.random.default_rng(4).normal(size=(270, 64)).astype(np.float32)
    clean = np.asarray(op(jnp.asarray(x), w))
    x[2, 17] = bad
    y = np.asarray(op(jnp.asarray(x), w))
    assert not np.isfinite(y[2]).any()
    np.testing.assert_array_equal(np.delete(y, 2, 0), np.delete(clean, 2, 0))


@pytest.mark.sample(1)
@pytest.mark.parametrize("rows", [2, 70, 270])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("op", BITS)
@pytest.mark.parametrize("byte", [0, 4, 5, 6, 8, 12, 16, 24])
def test_a_panel_with_a_damaged_header_gives_nan(op, byte, groups, rows):
    """An error can't be raised, since nobody waits for the device."""
    bits = BITS[op]
    w = packed(*weight(np.random.default_rng(), 64, 40, bits, groups), bits)
    damaged = jax.tree.map(lambda b: b.at[1, byte].set(b[1, byte] ^ np.uint8(3)), w)
    x = jnp.ones((rows, 64))
    y, good = np.asarray(op(x, damaged)), np.asarray(op(x, w))
    panel = range(w.panel, min(2 * w.panel, 40))
    assert np.isnan(y[:, panel]).all()
    np.testing.assert_array_equal(np.delete(y, panel, 1), np.delete(good, panel, 1))


@pytest.mark.parametrize("rows", [1, 33, 300])
@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("op", BITS)
def test_stacks_and_groups_beside_float64(op, groups, rows):
    """The index and the sizes of groups are read on the device."""
    bits = BITS[op]
    rng = np.random.default_rng(6)
    made = [weight(rng, 64, 40, bits, groups) for _ in range(3)]
    qvalue, scale = (jnp.asarray(np.stack(part)) for part in zip(*made, strict=True))
    stack = (te.pack_w8 if bits == 8 else te.pack_w4)(qvalue, scale)
    full = np.stack([matrix(*one) for one in made])
    x = rng.normal(size=(rows, 64)).astype(np.float32)
    bound = 2e-2 if op in (te.gemm_w8a8, te.gemm_w4a8) else 3e-5
    run = jax.jit(lambda x, i: op(x, stack, index=i))
    assert f"{op.__name__} index" in told(run.lower(x, 0).compile())
    for index, which in ((0, 0), (2, 2), (-1, 2), (7, 2), (-9, 0)):
        y = np.asarray(run(x, index), np.float64)
        assert (np.abs(y - x @ full[which]) <= bound * (np.abs(x) @ np.abs(full[which]))).all()
    run = jax.jit(lambda x, i, sizes: op(x, stack, index=i, group_sizes=sizes))
    index = jnp.asarray([2, 0, 0, -2, 1], jnp.int32)
    of_groups = np.asarray([2, 0, 0, 1, 1])
    for sizes in ((0, 0, 0, 0, 0), (1, 0, rows // 2, 0, 0), (rows, rows, 1, 0, 0), (1,) * 5):
        y = np.asarray(run(x, index, jnp.asarray(sizes, jnp.int32)), np.float64)
        which = np.repeat(of_groups, sizes)[:rows]
        wanted, size = np.zeros((2, rows, 40))
        for row, i in enumerate(which):
            wanted[row], size[row] = x[row] @ full[i], np.abs(x[row]) @ np.abs(full[i])
        assert (np.abs(y - wanted) <= bound * size).all()
    assert np.isnan(run(x, index, jnp.asarray([1, -1, 0, 0, 0], jnp.int32))).all()


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("op", BITS)
def test_nothing_of_what_was_in_memory_is_read(op, groups):
    """Results and workspaces lie where numbers were that are not any longer."""
    bits = BITS[op]
    w = packed(*weight(np.random.default_rng(5), 64, 40, bits, groups), bits)
    for rows in (1, 9, 33, 70, 270):
        x = jnp.ones((rows, 64))
        wanted = np.asarray(op(x, w))
        for _ in range(3):
            jax.block_until_ready([jnp.full((rows, 40), jnp.nan) for _ in range(8)])
            jax.block_until_ready(jnp.full((1 << 24,), jnp.nan))
            np.testing.assert_array_equal(op(x, w), wanted)
