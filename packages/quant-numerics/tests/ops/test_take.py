"""Lookups against NumPy's of the dequantized array."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import quant_numerics as qn
from jaxtap_testkit import examples
from jaxtap_testkit.programs import as_program
from quant_numerics import QArray, dequantize, pack, quantize, take

pytestmark = pytest.mark.sample(2)

dequantize, take = map(as_program, (dequantize, take))
IDS = np.array([[3, 0], [-1, 3], [2, 2]], np.int32)


def table(shape=(6, 8), qtype="int8", **options):
    x = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    return jax.jit(lambda x: quantize(x, qtype, **options))(x)


GRAIN = {
    "one": {},
    "rows": {"channel_axes": (0,)},
    "columns": {"channel_axes": (1,)},
    "tiles of columns": {"channel_axes": (0,), "tile_axes": {1: 4}},
    "tiles of rows": {"tile_axes": {0: 3}},
}


@pytest.mark.slow
@pytest.mark.parametrize("grain", GRAIN)
@pytest.mark.parametrize("qtype", ["int8", "int4", "fp8", "nf4"])
def test_what_is_taken(qtype, grain):
    q = table(qtype=qtype, **GRAIN[grain])

    @jax.jit
    def run(q):
        rows = {axis: qn.take(q, IDS, axis, dequantize=False) for axis in (0, 1, -1)}
        assert all(isinstance(one, QArray) for one in rows.values())
        taken = {axis: qn.take(q, IDS, axis) for axis in rows}
        return taken, jax.tree.map(qn.dequantize, rows, is_leaf=lambda x: isinstance(x, QArray))

    taken, rows = run(q)
    for axis in rows:
        want = np.take(np.asarray(dequantize(q)), IDS, axis)
        np.testing.assert_array_equal(taken[axis], want, err_msg=str(axis))
        np.testing.assert_array_equal(rows[axis], want, err_msg=str(axis))


def test_zero_points_blocks_and_packed():
    for q in (
        table(method="minmax", channel_axes=(0,)),
        table((6, 32), "nvfp4", channel_axes=(0,), tile_axes={1: 16}),
    ):
        np.testing.assert_array_equal(take(q, IDS), np.asarray(dequantize(q))[IDS])
    q = table(qtype="int3", channel_axes=(0,))
    for axis in (0, 1):
        np.testing.assert_array_equal(
            take(pack(q), IDS, axis), np.take(np.asarray(dequantize(q)), IDS, axis)
        )


@pytest.mark.slow
@examples(12)
@given(st.lists(st.integers(-9, 9), min_size=3, max_size=3), st.sampled_from(sorted(GRAIN)))
def test_out_of_range(ids, grain):
    q, ids = table(**GRAIN[grain]), np.array(ids)
    x = jnp.asarray(dequantize(q))
    np.testing.assert_array_equal(take(q, ids), jnp.take(x, ids, axis=0, mode="fill"))
    clipped = np.clip(np.where(ids < 0, ids + 6, ids), 0, 5)
    np.testing.assert_array_equal(take(q, ids, mode="clip"), np.asarray(x)[clipped])
    np.testing.assert_array_equal(take(x, ids), jnp.take(x, ids, axis=0, mode="fill"))
    rows = np.asarray(dequantize(take(q, ids, dequantize=False)))
    want = np.asarray(x)[clipped]
    if q.scale.shape[0] > 1:
        want = np.where(((ids < -6) | (ids > 5))[:, None], np.nan, want)
    np.testing.assert_array_equal(rows, want)


@pytest.mark.slow
def test_dtype_transformations_and_derivatives():
    q = table(channel_axes=(0,)).astype(jnp.bfloat16)
    assert take(q, IDS).dtype == jnp.bfloat16
    q = table(channel_axes=(0,))
    x = np.asarray(dequantize(q))
    np.testing.assert_array_equal(jax.vmap(lambda i: take(q, i))(IDS), x[IDS])
    out = jax.lax.scan(lambda c, i: (c, take(q, i)), 0, jnp.asarray(IDS))[1]
    np.testing.assert_array_equal(out, x[IDS])
    grad = jax.grad(lambda s: take(QArray(q.qvalue, s, qtype="int8", dtype=q.dtype), IDS).sum())(
        q.scale
    )
    counts = np.bincount(IDS.ravel() % 6, minlength=6)
    want = np.asarray(q.qvalue).astype(np.float32).sum(1) * counts
    np.testing.assert_allclose(grad[:, 0], want, rtol=1e-6)


def test_only_what_is_taken_is_dequantized():
    q = table((512, 8), channel_axes=(0,))
    hlo = jax.jit(lambda q, i: take(q, i)).lower(q, IDS).as_text()
    assert "tensor<512x8xf32>" not in hlo


def test_what_is_refused():
    q = table()
    with pytest.raises(TypeError, match="indices must be integers, got float32"):
        take(q, jnp.ones(3))
    with pytest.raises(ValueError, match="axis must be from -2 to 1, got 2"):
        take(q, IDS, 2)
    with pytest.raises(ValueError, match="'fill' or 'clip', got 'wrap'"):
        take(q, IDS, mode="wrap")
    with pytest.raises(IndexError, match=r"must have elements, got axis 0 of shape \(0, 4\)"):
        take(quantize(jnp.ones((0, 4)), "int8", channel_axes=(0,)), IDS)
