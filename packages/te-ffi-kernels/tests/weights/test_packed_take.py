"""Rows and columns out of packed weights have the bits of unpacking and taking."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import te_ffi_kernels as te
from jaxtap_testkit.te.weights import weight

# bits, dtype of scales
FORMS = [(8, np.float32), (4, np.float32), (4, np.float16)]
# k, n, groups
SHAPES = [(1, 1, 1), (70, 40, 1), (64, 33, 8), (96, 130, 3)]


def packed(bits, dtype, k, n, groups, seed=0):
    qvalue, scale = weight(np.random.default_rng(seed), k, n, bits, groups)
    scale = scale.astype(dtype)
    given = jnp.asarray(qvalue), jnp.asarray(scale)
    made = te.pack_w8(*given) if bits == 8 else te.pack_w4(*given)
    return made, qvalue.astype(np.float32) * np.repeat(scale.astype(np.float32), k // groups, 0)


OUTS = (jnp.float32, jnp.bfloat16, jnp.float16)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("bits", "dtype"), FORMS)
def test_values_are_those_of_numpy(bits, dtype):
    for k, n, groups in SHAPES:
        w, full = packed(bits, dtype, k, n, groups)
        indices = [
            np.array([[0, size - 1, -1], [size // 2, -size, size // 3]], np.int32)
            for size in (k, n)
        ]
        cases = list(itertools.product((0, 1), OUTS, (te, te.reference)))

        @jax.jit
        def found(w, indices, cases=cases):
            return [
                module.packed_take(w, indices[axis], axis=axis, out_dtype=out)
                for axis, out, module in cases
            ]

        for case, rows in zip(cases, found(w, indices), strict=True):
            axis, out, _ = case
            wanted = np.take(full if axis == 0 else full.T, indices[axis], 0).astype(out)
            assert rows.dtype == out
            np.testing.assert_array_equal(rows, wanted, err_msg=str((k, n, case)))


def test_beyond_the_ends_is_the_end():
    w, full = packed(4, np.float16, 64, 40, 2)
    given = jnp.array([40, 2**31 - 1, -41, -(2**31)], jnp.int32)
    for take in (te.packed_take, te.reference.packed_take):
        np.testing.assert_array_equal(take(w, given), full.T[[39, 39, 0, 0]])


def test_transformations():
    w, full = packed(4, np.float32, 64, 40, 2)
    indices = jnp.arange(6, dtype=jnp.int32).reshape(2, 3)
    mapped = jax.vmap(lambda i: te.packed_take(w, i))(indices)
    np.testing.assert_array_equal(mapped, full.T[:6].reshape(2, 3, 64))
    stack = jax.tree.map(lambda b: jnp.stack([b, b]), w)
    np.testing.assert_array_equal(jax.vmap(te.packed_take)(stack, indices), mapped)
    assert te.packed_take(w, indices[:0]).shape == (0, 3, 64)
    grad = jax.jit(jax.grad(lambda a: (te.packed_take(w, indices) @ a).sum()))(jnp.ones(64))
    np.testing.assert_allclose(grad, full.T[:6].sum(0), rtol=1e-5, atol=1e-6)
    text = jax.jit(te.packed_take).lower(w, indices).compile().as_text()
    assert text.count('custom_call_target="te_ffi_kernels.packed_take"') == 1
    text = jax.jit(te.packed_take).trace(w, indices).lower(lowering_platforms=("cuda",)).as_text()
    assert "te_ffi_kernels" not in text


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("place", "message"), [(0, "JTWP"), (8, "checksum"), (700, "checksum")])
def test_a_damaged_panel_is_refused(axis, place, message):
    w, _ = packed(4, np.float32, 64, 80, 2, seed=[axis, place])
    damaged = jax.tree.map(lambda b: b.at[1, place].set(b[1, place] ^ np.uint8(3)), w)
    with pytest.raises(
        (ValueError, jax.errors.JaxRuntimeError), match=rf"packed_take.*panel 1.*{message}"
    ):
        jax.block_until_ready(te.packed_take(damaged, jnp.array([40], jnp.int32), axis=axis))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight": None}, "must be a PackedWeight, got NoneType"),
        ({"indices": jnp.zeros(2)}, "indices must be int32, got float32"),
        ({"axis": 2}, "axis must be 0 or 1, got 2"),
        ({"out_dtype": jnp.int8}, "out_dtype must be float32"),
    ],
)
def test_bad_input(change, message):
    given = {"weight": packed(8, np.float32, 8, 8, 1)[0], "indices": jnp.zeros(2, jnp.int32)}
    with pytest.raises((TypeError, ValueError), match=message):
        te.packed_take(**(given | change))
    stack = jax.tree.map(lambda b: b[None], given["weight"])
    with pytest.raises(ValueError, match="weight must be one"):
        te.packed_take(stack, given["indices"])
