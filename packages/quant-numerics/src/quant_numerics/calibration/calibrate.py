"""From data to the range that quantized values cover, and from that to scales and zero points."""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from quant_numerics.array.tiles import Slices, check_block, slices
from quant_numerics.formats.encoding import decode, encode, power_of_two, to_float, whole_scale
from quant_numerics.formats.qtypes import QType, compute_dtype, float_dtype, get_qtype

_METHODS = (
    '"absmax[,factor]", "balanced", "minmax[,factor]", "rms,factor", "fixed,bound", '
    '"fixed,min,max", "percentile,p" with 50 < p <= 100, and "mse[,steps]"'
)


@dataclasses.dataclass(frozen=True)
class CalibrationMethod:
    """A calibration method.

    Attributes:
      name: one of the names of ``parse_calibration_method``.
      args: its numbers; "fixed" has a min and a max.
    """

    name: str
    args: tuple[float, ...] = ()

    @property
    def is_symmetric(self) -> bool:
        """Return whether the range is ``[-upper, upper]``, without a zero point."""
        if self.name == "fixed":
            return self.args[0] == -self.args[1]
        return self.name != "minmax"

    @property
    def clips(self) -> bool:
        """Return whether data can lie outside the range."""
        if self.name in ("absmax", "balanced", "minmax"):
            return self.factor < 1
        return not (self.name == "percentile" and self.args[0] == 100)

    @property
    def factor(self) -> float:
        """Return what the data's range is multiplied by."""
        return self.args[0] if self.args else 1.0


@functools.lru_cache
def parse_calibration_method(text: str) -> CalibrationMethod:
    """Parse a calibration method: a name and numbers, between commas.

    Args:
      text: one of

        - "absmax[,factor]": the largest magnitude (times the factor).
        - "balanced": the range of "absmax"; and of the values of a slice, those with the largest
          rounding errors are rounded to their other side until the errors sum to at most half a
          step (SQuant, Guo et al. 2022, arXiv:2202.07471, its step by channels). For integer
          formats of weights whose inputs are alike, as those of a depthwise convolution, or have a
          mean: each slice then makes no error of their common part.
        - "minmax[,factor]": from the least to the greatest value (times the factor), extended to
          contain 0. It has a zero point, so only integer formats take it.
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
    elif name == "balanced":
        if args:
            raise _bad_method(text, "it takes no number")
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
        raise _bad_method(text, f"the method {name!r} does not exist")
    return CalibrationMethod(name, args)


def _bad_method(text: str, why: str) -> ValueError:
    return ValueError(
        f"a calibration method must be one of {_METHODS}, got {text!r}: {why}. Choose another."
    )


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


_MSE_STEPS = 32
_MSE_LEAST_FACTOR = 0.3


def calibrate(
    x: ArrayLike,
    qtype: str | DTypeLike,
    *,
    channel_axes: Sequence[int] = (),
    tile_axes: Mapping[int, int | float] | None = None,
    method: str = "absmax",
) -> Calibration:
    """Return the range of every slice of `x`, by a calibration method.

    Except with "fixed", a slice with an infinity has an infinite range, even where the method would
    cut it off, and a slice with a NaN has a NaN range.

    Args:
      x: bfloat16, float16, float32 or (under x64) float64 array of any shape, also of size 0.
      qtype: the format, which "mse" tries out.
      channel_axes: axes that have one range per index.
      tile_axes: axis -> tile size, for axes that have one range per tile of consecutive elements;
        a float is one over the number of tiles.
      method: see ``parse_calibration_method``.

    Returns:
      Bounds of the shape that the scale will have.

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
    lower, upper = bounds(values, cut, parse_calibration_method(method), kind)
    return Calibration(
        None if lower is None else lower.reshape(cut.scale_shape), upper.reshape(cut.scale_shape)
    )


def inside(x: jax.Array, calibration: Calibration, cut: Slices) -> jax.Array:
    """Return which elements lie in the calibrated range of their slice, bool of the shape of x."""
    lower, upper = calibration
    lower = lax.neg(upper) if lower is None else lower
    values = cut.split(x.astype(compute_dtype(x.dtype)))
    lower, upper = (cut.split(bound.astype(values.dtype)) for bound in (lower, upper))
    return cut.join(lax.bitwise_and(values >= lower, values <= upper))


def bounds(
    values: jax.Array, cut: Slices, method: CalibrationMethod, kind: QType
) -> tuple[jax.Array | None, jax.Array]:
    """Return lower (None: symmetric) and upper bound of values split by ``cut.split``.

    ValueError: an asymmetric method for a format without zero points.
    """
    reduced = cut.reduced
    if not method.is_symmetric and kind.asymmetric is None:
        raise ValueError(
            f"the calibration method must be symmetric for {kind.name!r}, as only integer qtypes "
            f"have zero points, got {method.name!r}. Use one such as 'absmax'."
        )
    if method.name == "balanced" and kind.asymmetric is None:
        raise ValueError(
            f"the qtype of the calibration method 'balanced' must be an integer one, whose steps "
            f"are all alike, got {kind.name!r}. Use 'absmax'."
        )
    # lax, not jnp, here: jnp's own jits would double the time to trace a quantized model.
    if method.name == "minmax":
        low = lax.expand_dims(lax.reduce_min(values, reduced), reduced)
        high = lax.expand_dims(lax.reduce_max(values, reduced), reduced)
        zero = lax.full_like(low, 0)
        return lax.min(low, zero) * method.factor, lax.max(high, zero) * method.factor
    absmax = lax.expand_dims(lax.reduce_max(lax.abs(values), reduced), reduced)
    if method.name in ("absmax", "balanced"):
        return None, absmax if method.factor == 1 else absmax * method.factor
    if method.name == "fixed":
        lower, upper = (lax.full_like(absmax, bound) for bound in method.args)
        return None if method.is_symmetric else lower, upper
    if values.size == 0:
        return None, absmax
    # Fractions of the largest magnitude, so that no square overflows or vanishes.
    safe = at_least(absmax, LEAST_SCALE)
    if method.name == "rms":
        total = lax.expand_dims(lax.reduce_sum(lax.square(values / safe), reduced), reduced)
        upper = safe * (lax.sqrt(total / np.asarray(cut.counts, values.dtype)) * method.factor)
    elif method.name == "percentile":
        upper = _percentile(lax.abs(values), cut, method.args[0])
    else:
        upper = safe * _best_factor(values, safe, reduced, kind, int(method.factor) if method.args
                                    else _MSE_STEPS)  # fmt: skip
    return None, lax.select(lax.is_finite(absmax), upper, absmax)


def _percentile(magnitudes: jax.Array, cut: Slices, p: float) -> jax.Array:
    """Return the p-th percentile of each slice, linear between neighbours.

    XLA's CPU backend takes seconds to sort millions of numbers. So the number at a percentile is
    found by bisection: magnitudes are in the order of their bits, and each step halves the range of
    those by counting. The result is that of sorting, and not an estimate as from a histogram.
    """
    reduced, counts = cut.reduced, np.asarray(cut.counts)
    bits = lax.bitcast_convert_type(magnitudes, f"int{8 * magnitudes.dtype.itemsize}")
    shape = tuple(1 if a in reduced else n for a, n in enumerate(bits.shape))
    length = math.prod(bits.shape[a] for a in reduced)
    # What fills a shorter tile is zero, so it comes first.
    position = np.broadcast_to(length - counts + (counts - 1) * p / 100, shape)
    below = np.minimum(position.astype(np.int32), length - 1)
    above = np.minimum(below + 1, length - 1)
    most = np.iinfo(bits.dtype).max

    def count(limit: jax.Array) -> jax.Array:
        found = (bits <= limit).astype(np.int32)
        return lax.expand_dims(lax.reduce_sum(found, reduced), reduced)

    def halve(_: Any, between: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = between
        middle = low + lax.shift_right_logical(high - low, lax.full_like(low, 1))
        is_enough = count(middle) > below
        return lax.select(is_enough, low, middle + 1), lax.select(is_enough, middle, high)

    # Begin at the least and the greatest: in `shard_map` these vary over devices, as steps do.
    ends = [
        lax.expand_dims(end(bits, reduced), reduced) for end in (lax.reduce_min, lax.reduce_max)
    ]
    _, low = lax.fori_loop(0, 8 * magnitudes.dtype.itemsize - 1, halve, tuple(ends))
    following = lax.reduce_min(lax.select(bits > low, bits, lax.full_like(bits, most)), reduced)
    high = lax.select(count(low) > above, low, lax.expand_dims(following, reduced))
    low, high = (lax.bitcast_convert_type(x, magnitudes.dtype) for x in (low, high))
    return low + (high - low) * np.asarray(position - below, magnitudes.dtype)


def _best_factor(
    values: jax.Array, absmax: jax.Array, reduced: tuple[int, ...], kind: QType, steps: int
) -> jax.Array:
    """Return the factor of absmax with the least squared error."""

    def error(factor: jax.Array) -> jax.Array:
        scale, _, outer = scale_of(Calibration(None, absmax * factor), kind)
        scale = whole_scale(scale, outer)
        back = decode(encode(values, scale, kind), kind, values.dtype) * scale.astype(values.dtype)
        return lax.reduce_sum(lax.square((back - values) / absmax), reduced)

    factors = jnp.linspace(1.0, _MSE_LEAST_FACTOR, steps, dtype=values.dtype)
    best = factors[jnp.argmin(jax.vmap(error)(factors), axis=0)]
    return lax.expand_dims(best, reduced)
