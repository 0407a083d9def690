"""Numbers to quantized values and back, once the scale is known."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from quant_numerics.formats.qtypes import QType

_LARGEST_DIVISOR = 2.0**126
"""The largest power of two with a normal reciprocal; hardware may flush subnormals to zero."""


def encode(
    values: jax.Array,
    scale: jax.Array,
    kind: QType,
    zero_point: jax.Array | None = None,
    noise: jax.Array | None = None,
) -> jax.Array:
    """Return the quantized values of ``values / scale``, of float32 or float64.

    Ratios outside the range of the format are clipped to it. NaN becomes zero, or stays NaN in a
    float8 format. Where a scale is infinite, infinities become ±qmax and other values almost 0.
    `noise` is added in units of the last place before rounding to nearest; not for codebooks.
    """
    ratio = _ratio(values, scale, kind)
    if noise is not None:
        noise = noise.astype(ratio.dtype)
    if kind.kind == "int":
        if noise is not None:
            # The sum must not become a fused multiply-add, which rounds otherwise, on processors
            # that have one. What is clamped here is far outside the range.
            far = ratio.dtype.type(2.0 ** (kind.bits + 2))
            ratio = lax.clamp(-far, ratio, far) + noise
        qvalue = lax.round(ratio, lax.RoundingMethod.TO_NEAREST_EVEN)
        low, high = -kind.qmax, kind.qmax
        if zero_point is not None:
            assert kind.asymmetric is not None
            qvalue = qvalue + zero_point.astype(qvalue.dtype)
            low, high = kind.asymmetric
        qvalue = lax.clamp(qvalue.dtype.type(low), qvalue, qvalue.dtype.type(high))
        # Converting NaN to an integer is undefined; the NaN lives on in the scale.
        qvalue = _without_nan(qvalue)
        return qvalue.astype(kind.storage_dtype)
    limit = ratio.dtype.type(kind.qmax)
    ratio = lax.clamp(-limit, ratio, limit)
    if noise is not None:
        ratio = _round_at_random(ratio, noise, kind)
    if kind.codebook is not None:
        return _nearest(_without_nan(ratio), kind.codebook).astype(kind.storage_dtype)
    if kind.bits < 8:
        ratio = _without_nan(ratio)
    return to_float(ratio, kind.storage_dtype)


def whole_scale(scale: jax.Array, global_scale: jax.Array | None) -> jax.Array:
    """Return ``scale * global_scale`` as float32, of the scale's shape."""
    scale = scale if scale.dtype == jnp.float32 else scale.astype(jnp.float32)
    return scale if global_scale is None else scale * global_scale


def to_float(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return an array in a smaller float dtype, rounded to nearest, ties to even.

    XLA drops a conversion to fewer bits and back, on GPUs (its pass ``simplify-fp-conversions``,
    where ``xla_allow_excess_precision`` is set, as it is by default): what is quantized and used in
    one program would not be rounded. So the numbers are rounded before they are converted.
    """
    wide, info = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if info.nmant == 0 or info.bits >= wide.bits:  # powers of two, which are computed as such
        return x.astype(dtype)
    rounded = lax.reduce_precision(x, wide.nexp, info.nmant)
    if info.minexp > wide.minexp:
        # Subnormal numbers have the steps of the least normal ones.
        step = 2.0 ** (int(info.minexp) - int(info.nmant))
        small = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
        least = lax.full_like(x, 2.0 ** int(info.minexp))
        rounded = lax.select(lax.abs(x) < least, small, rounded)
    return rounded.astype(dtype)


def decode(qvalue: jax.Array, kind: QType, dtype: np.dtype) -> jax.Array:
    """Return what quantized values stand for, without zero point and scale."""
    if kind.codebook is None:
        return qvalue.astype(dtype)
    table = jnp.asarray(kind.codebook, dtype)
    return table.at[qvalue.astype(jnp.int32)].get(mode="promise_in_bounds")


def _ratio(values: jax.Array, scale: jax.Array, kind: QType) -> jax.Array:
    """Return ``values / scale``, without NaN where both are infinite."""
    if values.dtype == jnp.float64:
        largest = float(jnp.finfo(jnp.float32).max)
        return values / _at_most(scale, largest).astype(values.dtype)
    if kind.qmax < 4:
        # With so small a qmax, finite values may have scales beyond the largest divisor.
        shrink = lax.select(
            scale > 2.0**100, lax.full_like(scale, 2.0**-8), lax.full_like(scale, 1.0)
        )
        values, scale = values * shrink, scale * shrink
    # An infinite scale would make NaN of the infinities; divided by this, they go to ±qmax.
    return values / _at_most(scale, _LARGEST_DIVISOR)


def _at_most(scale: jax.Array, largest: float) -> jax.Array:
    """Clamp a scale between 0 and a number; a NaN stays."""
    return lax.clamp(np.float32(0), scale, np.float32(largest))


def _without_nan(x: jax.Array) -> jax.Array:
    return lax.select(lax.eq(x, x), x, lax.full_like(x, 0))


def _round_at_random(ratio: jax.Array, noise: jax.Array, kind: QType) -> jax.Array:
    """Round to a float format, with noise in units of last place."""
    if kind.codebook is not None:
        raise ValueError(
            f"a qtype must have even steps to round between at random, got {kind.name!r}. Use "
            "rounding=None, or an integer or float qtype."
        )
    # Rounded here, on the grid of the ratio's own binade: after the noise it could be in the
    # binade below, whose finer grid would make the rounding biased.
    info = jnp.finfo(kind.storage_dtype)
    exponent = lax.max(power_of_two(ratio), lax.full_like(ratio, 2.0 ** int(info.minexp)))
    ulp = exponent * (2.0 ** -int(info.nmant))
    return lax.round(ratio / ulp + noise, lax.RoundingMethod.TO_NEAREST_EVEN) * ulp


def power_of_two(x: jax.Array) -> jax.Array:
    """Return the largest power of two up to ``|x|``.

    It is 0 for subnormals, inf for inf, and NaN for NaN.
    """
    wide = x.dtype == jnp.float64
    mask = 0x7FF << 52 if wide else 0xFF << 23
    bits = lax.bitcast_convert_type(x, jnp.uint64 if wide else jnp.uint32)
    return lax.bitcast_convert_type(lax.bitwise_and(bits, lax.full_like(bits, mask)), x.dtype)


def _nearest(x: jax.Array, codebook: tuple[float, ...]) -> jax.Array:
    """Return the index of the nearest entry, int32; ties go down."""
    entries = np.asarray(codebook, np.float64)
    middles = jnp.asarray((entries[1:] + entries[:-1]) / 2, x.dtype)
    above = lax.expand_dims(x, (x.ndim,)) > lax.expand_dims(middles, tuple(range(x.ndim)))
    return above.astype(jnp.int32).sum(-1, dtype=jnp.int32)
