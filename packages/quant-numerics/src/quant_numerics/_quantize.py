"""From float arrays to QArrays and back: absmax calibration."""

import operator
from collections.abc import Mapping, Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from quant_numerics._qarray import QArray, split_axes, tile_sizes
from quant_numerics._qtypes import compute_dtype, float_dtype, get_qtype

_LEAST_SCALE = float(jnp.finfo(jnp.float32).tiny)
_LARGEST_DIVISOR = 2.0**125
"""Its reciprocal is no subnormal, which the hardware may flush to zero."""


def quantize(
    x: ArrayLike,
    qtype: str,
    *,
    channel_axes: Sequence[int] = (),
    tile_axes: Mapping[int, int] | None = None,
) -> QArray:
    """Quantizes symmetrically, with the scale set by the largest magnitude (absmax).

    A *slice* is the set of elements that share a scale: everything, without options. For each
    slice ``scale = absmax / qmax`` and ``code = round_half_even(x / scale)``, so that an element's
    error is at most ``scale / 2`` (arXiv:2004.09602, sections 3.1 and 3.2). Tiles are the
    block-wise scales of arXiv:2110.02861.

    Special values, per slice:

    - all zero, or absmax so small that the scale would be subnormal: the scale is the smallest
      normal float32, so that zeros have code 0 and stay zeros.
    - an infinity: scale inf, code ±qmax at the infinities and almost 0 elsewhere. The slice is
      then non-finite in every op, and an infinity keeps its sign where the codes' sum is not 0.
    - a NaN: scale NaN.

    Args:
      x: bfloat16, float16, float32 or (under x64) float64 array of any shape, also of size 0.
        Arithmetic is in float32; for float64 in float64, with the scale rounded to float32
        before the codes are computed from it (a scale beyond float32 counts as infinite).
      qtype: a name in ``QTYPES``.
      channel_axes: axes that have one scale per index.
      tile_axes: axis -> tile size, for axes that have one scale per tile of consecutive elements.

    Returns:
      QArray of ``x.shape`` and logical dtype ``x.dtype``. Its float32 scale has size 1, the full
      size (channel axes) or size / tile (tiled axes) along each axis.

    Raises:
      ValueError: an unknown qtype; an axis that is out of range or named twice; a tile that is
        not positive or does not divide its axis.
      TypeError: `x` is not of a supported float dtype.
    """
    kind = get_qtype(qtype)
    x = jnp.asarray(x)
    dtype = float_dtype(x.dtype, "the array to quantize")
    channels, tiles = _check_axes(x.shape, channel_axes, tile_axes or {})

    values, where = split_axes(x.astype(compute_dtype(dtype)), tiles)
    kept = {where[a] for a in channels} | {where[a] - 1 for a in tiles}
    reduced = tuple(a for a in range(values.ndim) if a not in kept)
    # lax, not jnp, here: jnp's own jits would double the time to trace a quantized model.
    absmax = lax.expand_dims(lax.reduce_max(lax.abs(values), reduced), reduced)
    # The least scale is for slices of zeros or of nothing (whose maximum is -inf), and for those
    # whose scale the hardware would flush to zero as a subnormal.
    scale = lax.max(absmax / kind.qmax, lax.full_like(absmax, _LEAST_SCALE)).astype(jnp.float32)

    # An infinite scale would make NaN of the infinities; divided by this, they go to ±qmax.
    divisor = lax.min(scale, lax.full_like(scale, _LARGEST_DIVISOR))
    codes = lax.round(values / divisor.astype(values.dtype), lax.RoundingMethod.TO_NEAREST_EVEN)
    largest = values.dtype.type(kind.qmax)
    codes = lax.clamp(-largest, codes, largest)
    # Converting NaN to an integer is undefined; the NaN lives on in the scale.
    codes = lax.select(codes == codes, codes, lax.full_like(codes, 0)).astype(kind.storage_dtype)

    scale_shape = [
        n if a in channels else n // tiles[a] if a in tiles else 1 for a, n in enumerate(x.shape)
    ]
    return QArray(codes.reshape(x.shape), scale.reshape(scale_shape), kind.name, dtype)


def dequantize(q: QArray) -> jax.Array:
    """Returns ``qvalue * scale`` as an array of ``q.shape`` and ``q.dtype``.

    The product is taken in float32 (float64 for logical float64), then rounded. In a slice with
    an infinity or a NaN every element is non-finite: infinities keep their sign, the rest is NaN.
    """
    compute = compute_dtype(q.dtype)
    tiles = tile_sizes(q)
    values, _ = split_axes(q.qvalue.astype(compute), tiles)
    scale, _ = split_axes(q.scale.astype(compute), dict.fromkeys(tiles, 1))
    return (values * scale).reshape(q.shape).astype(q.dtype)


def quantize_for_dot(
    x: ArrayLike, contracting: Sequence[int], qtype: str, tile_size: int | None = None
) -> QArray:
    """Quantizes one side of a dot product: one scale per index of all non-contracting axes.

    Args:
      x: float array.
      contracting: the contracting axes of `x`, in the order of ``dimension_numbers``.
      qtype: a name in ``QTYPES``.
      tile_size: if given, also one scale per tile of this size along the last axis named in
        `contracting` (so that both sides, given the same `tile_size`, are tiled alike).

    Raises:
      ValueError: as ``quantize``; or a tile size without a contracting axis.
    """
    x = jnp.asarray(x)
    contracting, _ = _check_axes(x.shape, contracting, {})
    if tile_size is not None and not contracting:
        raise ValueError(
            f"tile_size={tile_size} needs a contracting axis to tile, but there is none; "
            "leave tile_size out"
        )
    tiles = {} if tile_size is None else {contracting[-1]: tile_size}
    channels = [a for a in range(x.ndim) if a not in contracting]
    return quantize(x, qtype, channel_axes=channels, tile_axes=tiles)


def quantize_for_conv(
    x: ArrayLike,
    qtype: str,
    side: Literal["lhs", "rhs"],
    dimension_numbers_spec: lax.ConvDimensionNumbers | Sequence[int],
) -> QArray:
    """Quantizes one side of a convolution as finely as ``conv_general_dilated`` takes it.

    Args:
      x: float array, the input (``side="lhs"``: one scale per batch element) or the kernel
        (``side="rhs"``: one scale per output feature).
      qtype: a name in ``QTYPES``.
      side: "lhs" or "rhs".
      dimension_numbers_spec: what ``jax.lax.conv_dimension_numbers`` returns, or its `lhs_spec`
        or `rhs_spec` alone (the batch or output feature axis first).

    Raises:
      ValueError: another `side`, an unknown qtype, or an axis out of range.
      TypeError: a spec that does not hold axis numbers.
    """
    if side not in ("lhs", "rhs"):
        raise ValueError(f"side must be 'lhs' (the input) or 'rhs' (the kernel), got {side!r}")
    spec = dimension_numbers_spec
    if isinstance(spec, lax.ConvDimensionNumbers):
        spec = spec.lhs_spec if side == "lhs" else spec.rhs_spec
    if isinstance(spec, str) or not all(hasattr(a, "__index__") for a in spec):
        raise TypeError(
            "dimension_numbers_spec must be a ConvDimensionNumbers or a sequence of axis "
            f"numbers, got {spec!r}; make one with jax.lax.conv_dimension_numbers(lhs.shape, "
            "rhs.shape, dimension_numbers)"
        )
    return quantize(x, qtype, channel_axes=(spec[0],))


def _check_axes(
    shape: tuple[int, ...], channel_axes: Sequence[int], tile_axes: Mapping[int, int]
) -> tuple[list[int], dict[int, int]]:
    """Both arguments with axes made non-negative, or a ValueError."""
    ndim = len(shape)

    def canonical(axis: int) -> int:
        if not -ndim <= operator.index(axis) < ndim:
            raise ValueError(
                f"axis {axis} is out of range for shape {shape}: axes go from {-ndim} to {ndim - 1}"
            )
        return operator.index(axis) % ndim

    channels = [canonical(a) for a in channel_axes]
    tiled = [canonical(a) for a in tile_axes]
    if len({*channels, *tiled}) < len(channels) + len(tiled):
        raise ValueError(
            f"an axis is named twice: axes {channels} and tiled axes {tiled} of shape {shape} "
            "must all be different"
        )
    tiles = dict(zip(tiled, map(operator.index, tile_axes.values()), strict=True))
    for axis, tile in tiles.items():
        if tile <= 0 or shape[axis] % tile:
            raise ValueError(
                f"tile size {tile} does not fit axis {axis} of shape {shape}: it must be positive "
                f"and divide {shape[axis]}; choose a divisor, or pad the axis first"
            )
    return channels, tiles
