import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxtap_testkit.programs import as_program
from quant_numerics import (
    PackedQArray,
    dequantize,
    dot_general,
    einsum,
    get_qtype,
    pack,
    quantize,
    unpack,
)

pytestmark = pytest.mark.sample(2)

dequantize, pack, quantize, unpack = map(as_program, (dequantize, pack, quantize, unpack))

PACKABLE = ["int3", "int5", "int6", "int7"]


@pytest.mark.slow
@pytest.mark.parametrize("qtype", PACKABLE)
@pytest.mark.parametrize("shape", [(16,), (3, 5), (2, 1, 9), (2, 0), (0, 8)])
@pytest.mark.parametrize("method", ["absmax", "minmax"])
def test_qvalue_come_back(qtype, shape, method):
    rng = np.random.default_rng(0)
    q = quantize(rng.normal(size=shape).astype(np.float32), qtype, method=method)
    p = pack(q)
    kind = get_qtype(qtype)
    assert p.planes.dtype == jnp.uint8
    assert p.planes.shape == (*shape[:-1], kind.bits, -(-shape[-1] // 8))
    assert (p.shape, p.ndim, p.dtype) == (q.shape, q.ndim, q.dtype)
    back = unpack(p)
    assert jax.tree.structure(back) == jax.tree.structure(q)
    for a, b in zip(jax.tree.leaves(back), jax.tree.leaves(q), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.slow
@pytest.mark.parametrize("qtype", PACKABLE)
def test_every_code(qtype):
    low, high = get_qtype(qtype).asymmetric
    x = np.arange(low, high + 1, dtype=np.float32)
    q = quantize(x, qtype, method="minmax")
    np.testing.assert_array_equal(dequantize(unpack(pack(q))), x)


def test_bit_planes_are_numpys_packbits():
    q = quantize(np.arange(-15, 16, dtype=np.float32), "int5")
    qvalue = np.asarray(q.qvalue).astype(np.uint8)
    for bit, plane in enumerate(np.asarray(pack(q).planes)):
        np.testing.assert_array_equal(plane, np.packbits(qvalue >> bit & 1, bitorder="little"))


@pytest.mark.slow
def test_bytes_are_counted_in_bits():
    x = jnp.ones((4, 64))
    q = quantize(x, "int5", channel_axes=(0,))
    assert q.nbytes == 4 * 64 + 4 * 4
    assert pack(q).nbytes == 4 * 64 * 5 // 8 + 4 * 4
    assert quantize(x, "int2").nbytes == 64 + 4
    assert quantize(x, "nf4").nbytes == 128 + 4
    assert quantize(x, "nvfp4", tile_axes={1: 16}).nbytes == 128 + 4 + 4
    assert quantize(jnp.ones(3), "int4").nbytes == 2 + 4
    assert quantize(jnp.ones(3), "int4").size == 3


@pytest.mark.slow
def test_ops_take_it():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(3, 16)).astype(np.float32)
    q = quantize(rng.normal(size=(16, 5)).astype(np.float32), "int6", channel_axes=(1,))
    dims = (((1,), (0,)), ((), ()))
    want = dot_general(x, q, dims)
    np.testing.assert_array_equal(jax.jit(lambda x, p: dot_general(x, p, dims))(x, pack(q)), want)
    np.testing.assert_array_equal(einsum("ij,jk->ik", x, pack(q)), want)


@pytest.mark.slow
def test_scan_and_vmap_over_layers():
    x = np.random.default_rng(0).normal(size=(3, 4, 10)).astype(np.float32)
    q = quantize(x, "int3", channel_axes=(0,))
    p = pack(q)
    _, layers = jax.lax.scan(lambda c, p: (c, dequantize(unpack(p))), 0, p)
    np.testing.assert_array_equal(layers, dequantize(q))
    np.testing.assert_array_equal(jax.vmap(lambda p: dequantize(unpack(p)))(p), dequantize(q))
    assert isinstance(jax.eval_shape(lambda p: p, p), PackedQArray)


@pytest.mark.parametrize("qtype", ["int2", "int4", "int8", "int16", "fp8", "nf4"])
def test_what_has_no_gap_is_not_packed(qtype):
    with pytest.raises(ValueError, match=r"must have fewer bits .* int3, int5, int6 and int7"):
        pack(quantize(jnp.ones(8), qtype))


def test_an_axis_is_needed():
    with pytest.raises(ValueError, match="must have an axis to pack along"):
        pack(quantize(jnp.ones(()), "int3"))
