"""Programs in which XLA drops conversions to fewer bits and back, as it does for GPUs."""

import jax
import jax.extend as jex
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import quant_numerics as qn
from quant_numerics.formats.encoding import to_float

DTYPES = ("float8_e4m3fn", "float8_e5m2", "float4_e2m1fn", "float16", "bfloat16")


def run(closed, *args):
    """Run a program whose conversions from one float dtype to another do nothing."""
    values = dict(zip(closed.jaxpr.invars, args, strict=True))
    values |= zip(closed.jaxpr.constvars, closed.consts, strict=True)

    def read(var):
        return var.val if isinstance(var, jex.core.Literal) else values[var]

    for eqn in closed.jaxpr.eqns:
        given = [read(var) for var in eqn.invars]
        inner = next((v for v in eqn.params.values() if isinstance(v, jex.core.ClosedJaxpr)), None)
        floats = [jnp.issubdtype(v.aval.dtype, jnp.floating) for v in (*eqn.invars, *eqn.outvars)]
        if inner is not None:
            found = run(inner, *given)
        elif eqn.primitive.name == "convert_element_type" and all(floats):
            found = given
        else:
            found = eqn.primitive.bind(*given, **eqn.params)
            found = found if eqn.primitive.multiple_results else [found]
        values |= zip(eqn.outvars, found, strict=True)
    return [read(var) for var in closed.jaxpr.outvars]


def compiled(fn, *args):
    """Return what a program gives without its conversions, which is compiled as a whole."""
    closed = jax.make_jaxpr(fn)(*args)
    return jax.jit(lambda *args: run(closed, *args))(*args)


@pytest.mark.parametrize("name", DTYPES)
def test_each_number_is_rounded_before(name):
    """Halves between two numbers, subnormal ones and those near both ends, too."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    exact = np.arange(2 ** min(ml_dtypes.finfo(dtype).bits, 12)).astype(f"u{dtype.itemsize}")
    exact = exact.view(dtype).astype(np.float32)
    exact = exact[np.isfinite(exact) & ((exact == 0) | (abs(exact) > 1e-36))]
    x = np.concatenate([exact, exact * 1.01, (exact[1:] + exact[:-1]) / 2])
    x = np.clip(x, exact.min(), exact.max())
    (found,) = compiled(lambda x: to_float(x, dtype).astype(jnp.float32), x)
    np.testing.assert_array_equal(found, x.astype(dtype).astype(np.float32))


@pytest.mark.parametrize(
    ("qtype", "options"),
    [
        *((name, {"channel_axes": (0,)}) for name in DTYPES[:3]),
        ("mxfp8", {"tile_axes": {1: 32}}),
        ("mxfp4", {"tile_axes": {1: 32}}),
        ("nvfp4", {"tile_axes": {1: 16}}),
        ("int8", {"channel_axes": (0,), "scale_dtype": "bfloat16"}),
        ("int4", {"channel_axes": (0,), "scale_dtype": "float16", "method": "minmax"}),
    ],
)
def test_fake_quantization_quantizes(qtype, options):
    x = np.random.default_rng(0).standard_normal((4, 64), np.float32) * 3

    def fake(x):
        return qn.dequantize(qn.quantize(x, qtype, **options))

    (found,) = compiled(fake, x)
    np.testing.assert_array_equal(found, fake(x))
    assert np.abs(found - x).max() > 1e-3
