"""From a range to scales and zero points."""

import math
from typing import NamedTuple

import jax
import jax.export
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from quant_numerics.formats.encoding import power_of_two, to_float
from quant_numerics.formats.qtypes import QType, get_qtype

LEAST_SCALE = float(jnp.finfo(jnp.float32).tiny)
_LEAST_BLOCK_SCALE = 2.0**-9
"""The least float8_e4m3fn that is not zero."""


class Calibration(NamedTuple):
    """The range of each slice; a pytree.

    Attributes:
      lower: an array like `upper`, at most 0; or None for a symmetric range, from -upper.
      upper: shape of the scale; float32 (float64 from float64 data under x64).
    """

    lower: jax.Array | None
    upper: jax.Array


jax.export.register_namedtuple_serialization(
    Calibration, serialized_name="quant_numerics.Calibration"
)


def scale_of(
    calibration: Calibration, qtype: str | DTypeLike | QType, scale_dtype: DTypeLike | None = None
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Return scale, zero point and global scale (or None) for a range.

    - Integers, float8, float4 and codebooks: ``upper / qmax``, in the format's scale dtype (float32
      for those of this package). With a lower bound, ``(upper - lower) / (number of integers - 1)``
      and the integer zero point that is nearest to covering the range (arXiv:1712.05877, section
      2.1). Ranges so small that the scale would be subnormal get the smallest normal number, but 0
      where a codebook has no zero; infinite and NaN ranges have scale inf and NaN.
    - mxfp8, mxfp4: the power of two that puts `upper` in the format's last binade, as the OCP
      Microscaling Formats specification v1.0 has it (section 6.3); its numbers between qmax and
      the next power of two saturate. float8_e8m0fnu has no inf: infinite ranges have scale NaN.
    - nvfp4: ``upper / 6 / global`` in float8_e4m3fn, where ``global`` is the largest finite
      `upper` of all blocks over 448 * 6, one for the whole array (NVIDIA 2025, "Pretraining Large
      Language Models with NVFP4", arXiv:2509.25149, appendix B). float8_e4m3fn has no inf:
      infinite ranges have scale NaN, and other blocks are untouched.

    Args:
      calibration: the range of each slice.
      qtype: the format.
      scale_dtype: dtype of the scales, as in ``quantize``.

    Raises:
      ValueError: a lower bound for a format without zero points, or a `scale_dtype` that the format
        can't have.
    """
    kind = (qtype if isinstance(qtype, QType) else get_qtype(qtype)).with_scales(scale_dtype)
    lower, upper = calibration
    if kind.scale_dtype == jnp.float8_e8m0fnu:
        last_binade = 2.0 ** -math.floor(math.log2(kind.qmax))
        # inf and NaN have the power inf here, which becomes NaN.
        scale = power_of_two(upper.astype(jnp.float32)) * last_binade
        return at_least(scale, LEAST_SCALE).astype(kind.scale_dtype), None, None
    if kind.two_level:
        return _two_level_scale(upper.astype(jnp.float32), kind)
    if lower is None:
        scale = _normal(upper / kind.qmax, kind)
        if not kind.has_zero:  # zeros stay zeros
            scale = lax.select(upper == 0, lax.full_like(scale, 0), scale)
        return scale, None, None
    if kind.asymmetric is None:
        raise ValueError(
            f"a calibration must be without a lower bound for {kind.name!r}, as only integer "
            "qtypes have zero points, got one with it. Calibrate with a symmetric method such as "
            "'absmax'."
        )
    low, high = kind.asymmetric
    zero = lax.full_like(upper, 0)
    lower, upper = lax.min(lower, zero), lax.max(upper, zero)
    scale = upper / (high - low) - lower / (high - low)  # the difference itself could overflow
    scale = _normal(scale, kind)
    point = low - lower / scale.astype(lower.dtype)
    point = lax.round(point, lax.RoundingMethod.TO_NEAREST_EVEN)
    point = lax.clamp(lower.dtype.type(low), point, lower.dtype.type(high))
    # A zero point of 0 keeps the signs of infinities.
    point = lax.select(lax.is_finite(scale), point, zero)
    return scale, point.astype(kind.storage_dtype), None


def has_normal_scales(
    calibration: Calibration, qtype: str | DTypeLike, scale_dtype: DTypeLike
) -> jax.Array:
    """Return whether a dtype holds all scales as normal numbers.

    Where it doesn't, quantized values saturate at a scale that is too small (or is infinite), or
    are coarser than those with a float32 scale: float16 reaches from 6.1e-5 to 65504.

    Args:
      calibration: the range of each slice; ranges that are 0 don't count.
      qtype: the format.
      scale_dtype: the dtype to try.

    Returns:
      A bool array of shape ().
    """
    scale, _, _ = scale_of(calibration, qtype)
    info, scale = jnp.finfo(scale_dtype), scale.astype(jnp.float32)
    empty = calibration.upper == 0
    if calibration.lower is not None:
        empty &= calibration.lower == 0
    inside = (scale >= float(info.smallest_normal)) & (scale <= float(info.max))
    return jnp.all(empty | inside)


def _normal(scale: jax.Array, kind: QType) -> jax.Array:
    """Return scales in the format's dtype, none of them subnormal."""
    return to_float(at_least(scale, float(jnp.finfo(kind.scale_dtype).tiny)), kind.scale_dtype)


def _two_level_scale(upper: jax.Array, kind: QType) -> tuple[jax.Array, None, jax.Array]:
    finite = lax.is_finite(upper)
    largest_scale = float(jnp.finfo(kind.scale_dtype).max)
    largest = lax.reduce_max(lax.select(finite, upper, lax.full_like(upper, 0)), range(upper.ndim))
    outer = lax.expand_dims(largest, range(upper.ndim)) / (largest_scale * kind.qmax)
    # So large that times the least block scale it is still a normal number.
    outer = at_least(outer, LEAST_SCALE / _LEAST_BLOCK_SCALE)
    scale = upper / kind.qmax / outer
    scale = lax.clamp(jnp.float32(_LEAST_BLOCK_SCALE), scale, jnp.float32(largest_scale))
    scale = lax.select(finite, scale, lax.full_like(scale, jnp.nan))
    return to_float(scale, kind.scale_dtype), None, outer


def at_least(x: jax.Array, least: float) -> jax.Array:
    """Return the maximum of `x` and a number; NaN stays NaN."""
    return lax.clamp(x.dtype.type(least), x, x.dtype.type(jnp.inf))
