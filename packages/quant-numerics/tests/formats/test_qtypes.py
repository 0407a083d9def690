import dataclasses

import jax
import jax.numpy as jnp
import pytest

from quant_numerics import QTYPES, get_qtype
from quant_numerics.formats.qtypes import FLOAT_DTYPES, float_dtype, promote_floats

INTS = ["int2", "int3", "int4", "int5", "int6", "int7", "int8", "int16"]


@pytest.mark.parametrize("name", INTS)
def test_an_integer_qtype_is_symmetric_and_fits_its_storage(name):
    kind = get_qtype(name)
    assert (kind.name, kind.kind) == (name, "int")
    assert kind.qmax == 2 ** (kind.bits - 1) - 1
    assert kind.asymmetric == (-kind.qmax - 1, kind.qmax)
    storage = jnp.iinfo(kind.storage_dtype)
    assert storage.min <= kind.asymmetric[0]
    assert kind.asymmetric[1] <= storage.max
    # No narrower dtype of JAX's would do.
    assert storage.bits < 2 * kind.bits


@pytest.mark.parametrize(
    ("name", "dtype", "block", "scale"),
    [
        ("float8_e4m3fn", "float8_e4m3fn", None, "float32"),
        ("float8_e5m2", "float8_e5m2", None, "float32"),
        ("float4_e2m1fn", "float4_e2m1fn", None, "float32"),
        ("mxfp8", "float8_e4m3fn", 32, "float8_e8m0fnu"),
        ("mxfp4", "float4_e2m1fn", 32, "float8_e8m0fnu"),
        ("nvfp4", "float4_e2m1fn", 16, "float8_e4m3fn"),
    ],
)
def test_a_float_qtype_is_a_dtype_of_jaxs(name, dtype, block, scale):
    kind = get_qtype(name)
    assert (kind.kind, kind.storage_dtype, kind.block) == ("float", dtype, block)
    assert kind.scale_dtype == scale
    info = jnp.finfo(dtype)
    assert (kind.qmax, kind.bits) == (info.max, info.bits)
    assert kind.asymmetric is kind.codebook is None
    assert kind.two_level == (name == "nvfp4")


def test_all_are_known():
    floats = ["float8_e4m3fn", "float8_e5m2", "float4_e2m1fn"]
    blocks = ["mxfp8", "mxfp4", "nvfp4"]
    assert list(QTYPES) == [*INTS, *floats, "nf4", "iq4_nl", *blocks]


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("fp8", "float8_e4m3fn"),
        ("fp8_e4m3", "float8_e4m3fn"),
        ("fp8_e5m2", "float8_e5m2"),
        ("fp4", "float4_e2m1fn"),
        (jnp.int8, "int8"),
        (jnp.int4, "int4"),
        (jnp.dtype(jnp.int2), "int2"),
        (jnp.float8_e4m3fn, "float8_e4m3fn"),
        (jnp.dtype("int16"), "int16"),
    ],
)
def test_aliases_and_dtypes(given, name):
    assert get_qtype(given) is QTYPES[name]


def test_int4_storage_keeps_every_code():
    qvalue = jnp.arange(-7, 8, dtype=jnp.int8)
    stored = jax.jit(lambda c: c.astype(jnp.int4))(qvalue)
    assert stored.dtype == jnp.int4
    assert jnp.array_equal(stored.astype(jnp.int8), qvalue)


def test_the_table_and_its_entries_are_frozen():
    with pytest.raises(TypeError):
        QTYPES["int9"] = QTYPES["int8"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        QTYPES["int8"].qmax = 128


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("int-8", "int8"),
        ("i4", "int4"),
        (4, "nf4"),
        ("fp16", "fp8"),
        (jnp.float32, "float8_e5m2"),
        ("mxfp6", "mxfp8"),
    ],
)
def test_an_unknown_name_is_told_the_known_and_the_nearest(name, nearest):
    known = r"must be one of float4_e2m1fn, float8_e4m3fn, .*, fp4, got .* Did you mean "
    with pytest.raises(ValueError, match=rf"{known}'{nearest}'"):
        get_qtype(name)


@pytest.mark.parametrize("a", FLOAT_DTYPES, ids=str)
@pytest.mark.parametrize("b", FLOAT_DTYPES, ids=str)
def test_promotion_is_jaxs(a, b):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        assert promote_floats(a, b) == jnp.promote_types(a, b)


def test_float_dtype_is_canonical():
    assert float_dtype(jnp.float64, "it") == jnp.float32
    with jax.enable_x64(True):
        assert float_dtype(jnp.float64, "it") == jnp.float64


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.bool_, jnp.complex64, jnp.float8_e4m3fn])
def test_other_dtypes_are_refused_by_name(dtype):
    with pytest.raises(TypeError, match=f"the thing must have one of .*{jnp.dtype(dtype).name}"):
        float_dtype(dtype, "the thing")
