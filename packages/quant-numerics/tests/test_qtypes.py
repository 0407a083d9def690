import dataclasses

import jax
import jax.numpy as jnp
import pytest

from quant_numerics import QTYPES, get_qtype
from quant_numerics._qtypes import FLOAT_DTYPES, float_dtype, promote_floats


@pytest.mark.parametrize("name", ["int8", "int4"])
def test_a_qtype_is_symmetric_and_fits_its_storage(name):
    kind = get_qtype(name)
    assert kind.name == name
    assert kind.qmax == 2 ** (kind.bits - 1) - 1
    assert jnp.iinfo(kind.storage_dtype).bits == kind.bits


def test_int4_storage_keeps_every_code():
    codes = jnp.arange(-7, 8, dtype=jnp.int8)
    stored = jax.jit(lambda c: c.astype(jnp.int4))(codes)
    assert stored.dtype == jnp.int4
    assert jnp.array_equal(stored.astype(jnp.int8), codes)


def test_the_table_and_its_entries_are_frozen():
    with pytest.raises(TypeError):
        QTYPES["int9"] = QTYPES["int8"]
    with pytest.raises(dataclasses.FrozenInstanceError):
        QTYPES["int8"].qmax = 128


@pytest.mark.parametrize(("name", "nearest"), [("int-8", "int8"), ("i4", "int4"), (4, "int4")])
def test_an_unknown_name_is_told_the_known_and_the_nearest(name, nearest):
    with pytest.raises(ValueError, match=f"known qtypes are int4, int8; did you mean '{nearest}'"):
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
