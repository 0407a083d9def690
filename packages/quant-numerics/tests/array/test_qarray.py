import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from hijax_trace import ArrayProxy, MoveError
from quant_numerics import QArray, dequantize, pack, qarray, quantize


def sample(qtype="int8", **options):
    x = np.random.default_rng(0).normal(size=(4, 6)).astype(np.float32)
    return jax.jit(lambda x: quantize(x, qtype, **options))(x)


@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_it_flattens_to_qvalue_and_scale(qtype):
    q = sample(qtype=qtype, channel_axes=(0,))
    leaves, tree = jax.tree.flatten(q)
    assert [leaf.shape for leaf in leaves] == [(4, 6), (4, 1)]
    back = jax.tree.unflatten(tree, leaves)
    assert (back.qtype, back.dtype) == (qtype, jnp.float32)
    assert (back.shape, back.ndim) == ((4, 6), 2)


def test_unflatten_takes_any_leaf():
    q = sample()
    assert jax.tree.map(lambda _: None, q).qvalue is None
    abstract = jax.eval_shape(lambda: sample(channel_axes=(1,)))
    assert isinstance(abstract, QArray)
    assert (abstract.shape, abstract.scale.shape) == ((4, 6), (1, 6))


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        sample().qtype = "int4"


@pytest.mark.slow
def test_it_goes_through_jit():
    q = sample(tile_axes={1: 3})
    out = jax.jit(lambda q: q)(q)
    assert (out.qtype, out.dtype) == (q.qtype, q.dtype)
    assert jnp.array_equal(dequantize(out), dequantize(q))


def test_static_fields_are_part_of_the_jit_key():
    q = sample()
    assert jax.tree.structure(q) == jax.tree.structure(sample())
    for change in ({"qtype": "int4"}, {"dtype": jnp.dtype(jnp.bfloat16)}):
        assert jax.tree.structure(dataclasses.replace(q, **change)) != jax.tree.structure(q)


@pytest.mark.slow
@pytest.mark.parametrize("qtype", ["int8", "int4"])
def test_scan_slices_qvalue_and_scales_together(qtype):
    x = np.random.default_rng(0).normal(size=(3, 4, 5)).astype(np.float32)
    stacked = jax.jit(jax.vmap(lambda x: quantize(x, qtype, channel_axes=(0,))))(x)
    assert stacked.scale.shape == (3, 4, 1)
    _, layers = jax.lax.scan(lambda c, q: (c, dequantize(q)), 0, stacked)
    assert jnp.array_equal(layers, dequantize(stacked))


CODES = jnp.ones((4, 6), jnp.int8)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (4, 6), (2, 3), (1, 2)])
def test_qarray_takes_scales_that_fit(shape):
    q = qarray(CODES, jnp.full(shape, 2.0), "int8", jnp.bfloat16)
    assert q.dtype == jnp.bfloat16
    assert jnp.array_equal(dequantize(q), jnp.full((4, 6), 2, jnp.bfloat16))


@pytest.mark.parametrize("shape", [(), (6,), (3, 1), (1, 12), (1, 0), (4, 6, 1)])
def test_qarray_refuses_scales_that_do_not(shape):
    with pytest.raises(ValueError, match=r"scale must have the axes of .* got shape"):
        qarray(CODES, jnp.ones(shape), "int8", jnp.float32)


def test_qarray_refuses_wrong_dtypes():
    with pytest.raises(TypeError, match="qvalue must be int4 for qtype 'int4', got int8"):
        qarray(CODES, jnp.ones((1, 1)), "int4", jnp.float32)
    with pytest.raises(TypeError, match="scale must be float32 or bfloat16 or float16, got int8"):
        qarray(CODES, jnp.ones((1, 1), jnp.int8), "int8", jnp.float32)
    with pytest.raises(TypeError, match="logical dtype of a QArray"):
        qarray(CODES, jnp.ones((1, 1)), "int8", jnp.int32)
    with pytest.raises(ValueError, match="a qtype must be one of"):
        qarray(CODES, jnp.ones((1, 1)), "int9", jnp.float32)


@pytest.mark.slow
def test_zero_points_and_global_scales_are_leaves():
    q = sample(method="minmax", channel_axes=(0,))
    assert [leaf.shape for leaf in jax.tree.leaves(q)] == [(4, 6), (4, 1), (4, 1)]
    x = np.ones((4, 32), np.float32)
    q = quantize(x, "nvfp4", tile_axes={1: 16})
    assert [leaf.shape for leaf in jax.tree.leaves(q)] == [(4, 32), (1, 2), (1, 1)]


def test_qarray_checks_zero_points():
    scale = jnp.ones((4, 1))
    point = jnp.full((4, 1), 3, jnp.int8)
    q = qarray(CODES, scale, "int8", jnp.float32, zero_point=point)
    assert jnp.array_equal(dequantize(q), jnp.full((4, 6), -2.0))
    with pytest.raises(ValueError, match=r"the scale's shape \(4, 1\), got \(1, 1\)"):
        qarray(CODES, scale, "int8", jnp.float32, zero_point=point[:1])
    with pytest.raises(TypeError, match="the dtype of qvalue, int8, got float32"):
        qarray(CODES, scale, "int8", jnp.float32, zero_point=scale)
    with pytest.raises(ValueError, match="only integer qtypes have one"):
        qarray(CODES.astype(jnp.uint4), scale, "nf4", jnp.float32, zero_point=point)


def test_qarray_checks_global_scales():
    qvalue = jnp.ones((4, 32), jnp.float4_e2m1fn)
    scale = jnp.ones((4, 2), jnp.float8_e4m3fn)
    outer = jnp.full((4, 1), 2.0)
    q = qarray(qvalue, scale, "nvfp4", jnp.float32, global_scale=outer)
    assert jnp.array_equal(dequantize(q), jnp.full((4, 32), 2.0))
    with pytest.raises(ValueError, match="must be given for qtype 'nvfp4', got None"):
        qarray(qvalue, scale, "nvfp4", jnp.float32)
    with pytest.raises(ValueError, match="must be None for qtype 'int8', got one"):
        qarray(CODES, jnp.ones((1, 1)), "int8", jnp.float32, global_scale=outer)
    with pytest.raises(ValueError, match="global_scale must have the axes of a scale"):
        qarray(qvalue, scale, "nvfp4", jnp.float32, global_scale=jnp.ones((2, 1)))
    with pytest.raises(TypeError, match="global_scale must be float32"):
        qarray(qvalue, scale, "nvfp4", jnp.float32, global_scale=scale[:, :1])
    with pytest.raises(TypeError, match="scale must be float8_e4m3fn"):
        qarray(qvalue, outer, "nvfp4", jnp.float32, global_scale=outer)


@pytest.mark.slow
def test_it_is_a_proxy():
    q = sample(tile_axes={1: 3})
    assert isinstance(q, ArrayProxy)
    assert jnp.array_equal(q.restore(), dequantize(q))
    (moved,) = q.moved("transpose", {"permutation": (1, 0)}, [q])
    assert moved.scale.shape == (2, 1)
    assert jnp.array_equal(moved.restore(), dequantize(q).T)
    with pytest.raises(MoveError, match="exp does more"):
        q.moved("exp", {}, [q])
    p = pack(quantize(jnp.ones((4, 6)), "int3"))
    assert isinstance(p, ArrayProxy)
    assert jnp.array_equal(p.restore(), jnp.ones((4, 6)))
    (moved,) = p.moved("transpose", {"permutation": (1, 0)}, [p])
    assert moved.shape == (6, 4)
