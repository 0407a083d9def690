"""From data to the range that quantized values cover."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from quant_numerics.array.tiles import Slices, check_block, slices
from quant_numerics.calibration.method import CalibrationMethod, parse_calibration_method
from quant_numerics.calibration.scale import LEAST_SCALE, Calibration, at_least, scale_of
from quant_numerics.formats.dtypes import compute_dtype, float_dtype
from quant_numerics.formats.encoding import decode, encode, whole_scale
from quant_numerics.formats.qtypes import QType, get_qtype

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
