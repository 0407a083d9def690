"""Calibration: from data to the range that codes cover, and from the range to scales."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from quant_numerics._codes import decode, encode, power_of_two
from quant_numerics._qtypes import QType, compute_dtype, float_dtype, get_qtype
from quant_numerics._slices import check_block, slices

_LEAST_SCALE = float(jnp.finfo(jnp.float32).tiny)
_LEAST_BLOCK_SCALE = 2.0**-9
"""The least float8_e4m3fn that is not zero."""
_MSE_STEPS = 32
_MSE_LEAST_FACTOR = 0.3

_METHODS = (
    '"absmax[,factor]", "minmax[,factor]", "rms,factor", "fixed,bound", "fixed,min,max", '
    '"percentile,p" with 50 < p <= 100, and "mse[,steps]"'
)


@dataclasses.dataclass(frozen=True)
class CalibrationMethod:
    """A parsed calibration method: its name and its numbers."""

    name: str
    args: tuple[float, ...] = ()

    @property
    def is_symmetric(self) -> bool:
        """Whether the range is ``[-upper, upper]``, so that no zero point is needed."""
        if self.name == "fixed":
            return self.args[0] == -self.args[1]
        return self.name != "minmax"

    @property
    def clips(self) -> bool:
        """Whether data can lie outside the range."""
        if self.name in ("absmax", "minmax"):
            return self.factor < 1
        return not (self.name == "percentile" and self.args[0] == 100)

    @property
    def factor(self) -> float:
        """What the data's range is multiplied by."""
        return self.args[0] if self.args else 1.0


@functools.lru_cache
def parse_calibration_method(text: str) -> CalibrationMethod:
    """Reads a method: a name and numbers, between commas.

    Args:
      text: one of

        - "absmax[,factor]": the largest magnitude (times the factor).
        - "minmax[,factor]": from the least to the greatest value (times the factor), with 0 made
          part of it; with a zero point, for integer formats only.
        - "rms,factor": the root of the mean square, times the factor.
        - "fixed,bound" and "fixed,min,max": a range that no data changes; min <= 0 <= max.
        - "percentile,p": the p-th percentile of the magnitudes, 50 < p <= 100.
        - "mse[,steps]": of `steps` (32) ranges between 0.3 and 1 times the largest magnitude, that
          with the least squared error of quantizing.

    Raises:
      ValueError: an unknown name, or numbers that do not fit it.
    """
    name, *rest = (part.strip().lower() for part in text.split(","))
    try:
        args = tuple(float(part) for part in rest)
    except ValueError:
        raise _bad_method(text, "what follows the name must be numbers") from None
    if not all(map(math.isfinite, args)):
        raise _bad_method(text, "the numbers must be finite")
    if name in ("absmax", "minmax"):
        if len(args) > 1 or any(a <= 0 for a in args):
            raise _bad_method(text, "it takes at most one number, a factor above 0")
    elif name == "rms":
        if len(args) != 1 or args[0] <= 0:
            raise _bad_method(text, "it takes one number, a factor above 0")
    elif name == "fixed":
        args = (-args[0], args[0]) if len(args) == 1 else args
        if len(args) != 2 or not args[0] <= 0 <= args[1] or args[0] == args[1]:
            raise _bad_method(text, "it takes a bound, or a min <= 0 and a max >= 0 that differ")
    elif name == "percentile":
        if len(args) != 1 or not 50 < args[0] <= 100:
            raise _bad_method(text, "it takes one number p, 50 < p <= 100")
    elif name == "mse":
        if len(args) > 1 or any(a < 2 or a != int(a) for a in args):
            raise _bad_method(text, "it takes at most one whole number of steps, 2 or more")
    else:
        raise _bad_method(text, f"there is no method {name!r}")
    return CalibrationMethod(name, args)


def _bad_method(text: str, why: str) -> ValueError:
    return ValueError(f"calibration method {text!r}: {why}; allowed are {_METHODS}")


class Calibration(NamedTuple):
    """The range that the codes of each slice cover; a pytree.

    Attributes:
      lower: an array like `upper`, at most 0; or None for a symmetric range, from -upper.
      upper: shape of the scale; float32 (float64 from float64 data under x64).
    """

    lower: jax.Array | None
    upper: jax.Array


def calibrate(
    x: ArrayLike,
    qtype: str | DTypeLike,
    *,
    channel_axes: Sequence[int] = (),
    tile_axes: Mapping[int, int | float] | None = None,
    method: str = "absmax",
) -> Calibration:
    """The range of every slice of `x`, by a calibration method.

    Except with "fixed", a slice with an infinity has an infinite range, and with a NaN a NaN range:
    also where the method would cut the infinity off.

    Args:
      x: bfloat16, float16, float32 or (under x64) float64 array of any shape, also of size 0.
      qtype: the format, which "mse" tries out.
      channel_axes: axes that have one range per index.
      tile_axes: axis -> tile size, for axes that have one range per tile of consecutive elements;
        a float is one over the number of tiles.
      method: see ``parse_calibration_method``.

    Raises:
      ValueError: as ``quantize``.
      TypeError: `x` is not of a supported float dtype.
    """
    kind = get_qtype(qtype)
    x = jnp.asarray(x)
    dtype = float_dtype(x.dtype, "the array to calibrate")
    cut = slices(x.shape, channel_axes, tile_axes)
    check_block(kind, cut)
    values = cut.split(x.astype(compute_dtype(dtype)))
    lower, upper = bounds(values, cut.reduced, parse_calibration_method(method), kind)
    return Calibration(
        None if lower is None else lower.reshape(cut.scale_shape), upper.reshape(cut.scale_shape)
    )


def bounds(
    values: jax.Array, reduced: tuple[int, ...], method: CalibrationMethod, kind: QType
) -> tuple[jax.Array | None, jax.Array]:
    """Lower (None: symmetric) and upper bound, with `reduced` axes of size 1."""
    if not method.is_symmetric and kind.asymmetric is None:
        raise ValueError(
            f"calibration method {method.name!r} gives a zero point, which only integer qtypes "
            f"have, and {kind.name!r} is none; use a symmetric method such as 'absmax'"
        )
    # lax, not jnp, here: jnp's own jits would double the time to trace a quantized model.
    if method.name == "minmax":
        low = lax.expand_dims(lax.reduce_min(values, reduced), reduced)
        high = lax.expand_dims(lax.reduce_max(values, reduced), reduced)
        zero = lax.full_like(low, 0)
        return lax.min(low, zero) * method.factor, lax.max(high, zero) * method.factor
    absmax = lax.expand_dims(lax.reduce_max(lax.abs(values), reduced), reduced)
    if method.name == "absmax":
        return None, absmax if method.factor == 1 else absmax * method.factor
    if method.name == "fixed":
        lower, upper = (lax.full_like(absmax, bound) for bound in method.args)
        return None if method.is_symmetric else lower, upper
    count = math.prod(values.shape[a] for a in reduced)
    if values.size == 0:
        return None, absmax
    # Fractions of the largest magnitude, so that no square overflows or vanishes.
    safe = _at_least(absmax, _LEAST_SCALE)
    if method.name == "rms":
        mean = lax.reduce_sum(lax.square(values / safe), reduced) / count
        upper = safe * (lax.expand_dims(lax.sqrt(mean), reduced) * method.factor)
    elif method.name == "percentile":
        upper = _percentile(lax.abs(values), reduced, method.args[0])
    else:
        upper = safe * _best_factor(values, safe, reduced, kind, int(method.factor) if method.args
                                    else _MSE_STEPS)  # fmt: skip
    return None, lax.select(lax.is_finite(absmax), upper, absmax)


def _percentile(magnitudes: jax.Array, reduced: tuple[int, ...], p: float) -> jax.Array:
    """The p-th percentile, linear between neighbours, with `reduced` axes of size 1."""
    kept = [a for a in range(magnitudes.ndim) if a not in reduced]
    shape = [magnitudes.shape[a] for a in kept]
    rows = magnitudes.transpose(*kept, *reduced).reshape(*shape, -1)
    rows = lax.sort(rows, dimension=-1)
    position = (rows.shape[-1] - 1) * p / 100
    below = min(int(position), rows.shape[-1] - 1)
    above = min(below + 1, rows.shape[-1] - 1)
    low, high = (lax.index_in_dim(rows, i, -1, keepdims=False) for i in (below, above))
    return lax.expand_dims(low + (high - low) * (position - below), reduced)


def _best_factor(
    values: jax.Array, absmax: jax.Array, reduced: tuple[int, ...], kind: QType, steps: int
) -> jax.Array:
    """The factor of absmax with the least squared error; of equal ones the greatest."""

    def error(factor: jax.Array) -> jax.Array:
        scale, _, outer = scale_of(Calibration(None, absmax * factor), kind)
        scale = scale.astype(jnp.float32)
        scale = scale if outer is None else scale * outer
        back = decode(encode(values, scale, kind), kind, values.dtype) * scale.astype(values.dtype)
        return lax.reduce_sum(lax.square((back - values) / absmax), reduced)

    factors = jnp.linspace(1.0, _MSE_LEAST_FACTOR, steps, dtype=values.dtype)
    best = factors[jnp.argmin(jax.vmap(error)(factors), axis=0)]
    return lax.expand_dims(best, reduced)


def scale_of(
    calibration: Calibration, qtype: str | DTypeLike | QType
) -> tuple[jax.Array, jax.Array | None, jax.Array | None]:
    """Scale, zero point and global scale for a range; the latter two None where there is none.

    - Integers, float8, float4 and nf4: ``upper / qmax``, in float32. With a lower bound,
      ``(upper - lower) / (number of codes - 1)`` and the integer zero point that is nearest to
      covering the range (arXiv:1712.05877, section 2.1). Ranges so small that the scale would be
      subnormal get the smallest normal float32; infinite and NaN ranges have scale inf and NaN.
    - mxfp8, mxfp4: the power of two that puts `upper` in the format's last binade, as the OCP
      Microscaling Formats specification v1.0 has it (section 6.3); its numbers between qmax and
      the next power of two saturate. float8_e8m0fnu has no inf: infinite ranges have scale NaN.
    - nvfp4: ``upper / 6 / global`` in float8_e4m3fn, where ``global`` is the largest finite
      `upper` of all blocks over 448 * 6, one for the whole array (NVIDIA 2025, "Pretraining Large
      Language Models with NVFP4", arXiv:2509.25149, appendix B). float8_e4m3fn has no inf:
      infinite ranges have scale NaN, and other blocks are untouched.
    """
    kind = qtype if isinstance(qtype, QType) else get_qtype(qtype)
    lower, upper = calibration
    if kind.scale_dtype == jnp.float8_e8m0fnu:
        last_binade = 2.0 ** -math.floor(math.log2(kind.qmax))
        # inf and NaN have the power inf here, which becomes NaN.
        scale = power_of_two(upper.astype(jnp.float32)) * last_binade
        return _at_least(scale, _LEAST_SCALE).astype(kind.scale_dtype), None, None
    if kind.two_level:
        return _two_level_scale(upper.astype(jnp.float32), kind)
    if lower is None:
        return _at_least(upper / kind.qmax, _LEAST_SCALE).astype(jnp.float32), None, None
    if kind.asymmetric is None:
        raise ValueError(
            f"a calibration with a lower bound gives a zero point, which only integer qtypes have, "
            f"and {kind.name!r} is none; calibrate with a symmetric method such as 'absmax'"
        )
    low, high = kind.asymmetric
    zero = lax.full_like(upper, 0)
    lower, upper = lax.min(lower, zero), lax.max(upper, zero)
    scale = upper / (high - low) - lower / (high - low)  # the difference itself could overflow
    scale = _at_least(scale, _LEAST_SCALE).astype(jnp.float32)
    point = low - lower / scale.astype(lower.dtype)
    point = lax.round(point, lax.RoundingMethod.TO_NEAREST_EVEN)
    point = lax.clamp(lower.dtype.type(low), point, lower.dtype.type(high))
    # A zero point of 0 keeps the signs of infinities.
    point = lax.select(lax.is_finite(scale), point, zero)
    return scale, point.astype(kind.storage_dtype), None


def _two_level_scale(upper: jax.Array, kind: QType) -> tuple[jax.Array, None, jax.Array]:
    finite = lax.is_finite(upper)
    largest_scale = float(jnp.finfo(kind.scale_dtype).max)
    largest = lax.reduce_max(lax.select(finite, upper, lax.full_like(upper, 0)), range(upper.ndim))
    outer = lax.expand_dims(largest, range(upper.ndim)) / (largest_scale * kind.qmax)
    # So that the product with the least block scale is a normal number too.
    outer = _at_least(outer, _LEAST_SCALE / _LEAST_BLOCK_SCALE)
    scale = upper / kind.qmax / outer
    scale = lax.clamp(jnp.float32(_LEAST_BLOCK_SCALE), scale, jnp.float32(largest_scale))
    scale = lax.select(finite, scale, lax.full_like(scale, jnp.nan))
    return scale.astype(kind.scale_dtype), None, outer


def _at_least(x: jax.Array, least: float) -> jax.Array:
    """The maximum with a number; a NaN stays."""
    return lax.clamp(x.dtype.type(least), x, x.dtype.type(jnp.inf))
