"""Trees of every kind of leaf, and comparison bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from provider_xla import PtqProvider, QuantizationRule

DTYPES = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32"]
DTYPES += ["float16", "bfloat16", "float32", "complex64"]
DTYPES += ["int2", "uint2", "int4", "uint4", "float4_e2m1fn"]
DTYPES += ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu", "float8_e4m3b11fnuz"]
BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}


def random_bits(dtype, shape, seed=0):
    """A NumPy array of any bits, NaN and infinities among them."""
    rng = np.random.default_rng(seed)
    dtype = jnp.dtype(dtype)
    if dtype.name == "bool":
        return rng.integers(0, 2, shape).astype(bool)
    bits = BITS.get(dtype.name)
    if bits is not None:
        qvalue = rng.integers(0, 2**bits, shape).astype(np.uint8)
        if dtype.name.startswith("int"):
            return (qvalue.astype(np.int8) - 2 ** (bits - 1)).astype(dtype)
        return qvalue.view(dtype) if dtype.name.startswith("float") else qvalue.astype(dtype)
    data = rng.integers(0, 256, (*shape, dtype.itemsize)).astype(np.uint8)
    return data.view(dtype).reshape(shape)


def quantized(qtype, shape=(3, 64, 6), zero_point=False, dtype="float32", seed=0):
    """Return a QArray of random values, packed where bits need it."""
    kind = qn.get_qtype(qtype)
    scales = (shape[0], shape[1] // (kind.block or 8), shape[2])

    def draw(dtype, shape):
        return jnp.asarray(random_bits(dtype, shape, seed))

    qvalue = draw(kind.storage_dtype, shape)
    if kind.bits in (3, 5, 6, 7):  # the storage has quantized values that the format has not
        low = np.asarray(qvalue, np.int8) >> (4 if kind.bits == 3 else 8) - kind.bits
        qvalue = jnp.asarray(low.astype(kind.storage_dtype))
    q = qn.qarray(
        qvalue,
        draw(kind.scale_dtype, scales),
        qtype,
        dtype,
        zero_point=draw(kind.storage_dtype, scales) if zero_point else None,
        global_scale=draw("float32", (1, 1, 1)) if kind.two_level else None,
    )
    return qn.pack(q) if kind.bits in (3, 5, 6, 7) else q


def bits(array):
    return np.asarray(array).tobytes()


def is_state(node):
    return isinstance(node, qn.Statistics)


def same(actual, expected):
    """Assert that two trees are the same: structure, types, and every bit."""
    actual, expected = (
        jax.tree.map(lambda s: s.state if is_state(s) else s, tree, is_leaf=is_state)
        for tree in (actual, expected)
    )
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        if not hasattr(b, "dtype"):
            assert type(a) is type(b)
            assert a == b or repr(a) == repr(b)
            continue
        assert isinstance(a, np.ndarray | np.generic) == isinstance(b, np.ndarray | np.generic)
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert bits(a) == bits(b)


def mlp(params, x):
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x @ params["head"]


def mlp_params(depth=2, width=16, out=6, seed=0):
    rng = np.random.default_rng(seed)

    def draw(*shape):
        return jnp.asarray(rng.normal(size=shape), jnp.float32)

    layers = [{"w": draw(width, width), "b": draw(width)} for _ in range(depth)]
    return {"layers": layers, "head": draw(width, out)}


def mlp_plan(*rules, params=None, **sizes):
    params = mlp_params(**sizes) if params is None else params
    width = params["head"].shape[0]
    rules = rules or (QuantizationRule(weight_qtype="int4", tile_size=8),)
    return PtqProvider(rules).plan(mlp, params, jax.ShapeDtypeStruct((2, width), jnp.float32))
