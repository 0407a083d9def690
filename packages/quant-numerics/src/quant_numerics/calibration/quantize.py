"""From float arrays to QArrays, and round trips with straight-through derivatives."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from quant_numerics.array.explicit import sharded_like
from quant_numerics.array.qarray import QArray, dequantize, qarray
from quant_numerics.array.tiles import (
    Slices,
    check_block,
    dot_granularity,
    ragged_tiles,
    slices,
    slices_of,
)
from quant_numerics.calibration.calibrate import (
    Calibration,
    bounds,
    calibrate,
    inside,
    parse_calibration_method,
    scale_of,
)
from quant_numerics.formats.encoding import StochasticRounding, encode, whole_scale
from quant_numerics.formats.qtypes import compute_dtype, float_dtype, get_qtype


def quantize(
    x: ArrayLike,
    qtype: str | DTypeLike,
    *,
    channel_axes: Sequence[int] = (),
    tile_axes: Mapping[int, int | float] | None = None,
    method: str = "absmax",
    rounding: StochasticRounding | None = None,
    scale_dtype: DTypeLike | None = None,
) -> QArray:
    """Quantize an array, the range of each slice from its data.

    Its steps are ``calibrate``, ``scale_of`` and ``quantize_with``. A *slice* is the set of
    elements that share a scale: without options, the whole array. With the method "absmax" and an
    integer qtype, for each slice ``scale = absmax / qmax`` and ``qvalue = round_half_even(x /
    scale)``, so that an element's error is at most ``scale / 2`` (arXiv:2004.09602, sections 3.1
    and 3.2). Tiles are the block-wise scales of arXiv:2110.02861. Float formats round ``x / scale``
    to their nearest number, half to even; nf4 takes the nearest entry of its codebook. What is
    outside the range saturates. With the method "balanced" some values are rounded to their other
    side, and an element's error is less than `scale`.

    Special values, per slice, for all methods but "fixed":

    - all zero, or absmax so small that the scale would be subnormal: the scale is the smallest
      normal float32, so that zeros stay zeros. (nvfp4: 2**-9 with a global scale of at least
      2**-117.)
    - an infinity: scale inf, quantized values ±qmax at the infinities and almost 0 elsewhere. The
      slice is then non-finite in every op, and an infinity keeps its sign where the integer sum is
      not 0. (mxfp8, mxfp4 and nvfp4: scale NaN.)
    - a NaN: scale NaN.

    "fixed" looks at no data: infinities saturate, and a NaN becomes the number nearest to zero, or
    stays NaN in the float8 formats.

    Args:
      x: bfloat16, float16, float32 or (under x64) float64 array of any shape, also of size 0.
        Arithmetic is in float32; for float64 in float64, with the scale rounded to float32
        before values are divided by it (a scale beyond float32 counts as infinite).
      qtype: a name in ``QTYPES``, an alias, or a dtype.
      channel_axes: axes that have one scale per index.
      tile_axes: axis -> tile size, for axes that have one scale per tile of consecutive elements,
        the last of which may be shorter; a float is one over the number of tiles.
      method: see ``parse_calibration_method``.
      rounding: None (to nearest) or a ``StochasticRounding``.
      scale_dtype: None for that of the format; for those with float32 scales also bfloat16 or
        float16. Values are divided by the rounded scales. In float16, scales below 6.1e-5 become
        that, and those beyond 65504 infinite: see ``has_normal_scales``.

    Returns:
      QArray of ``x.shape`` and logical dtype ``x.dtype``. Its scale has size 1, the full size
      (channel axes) or the number of tiles (tiled axes) along each axis.

    Raises:
      ValueError: an unknown qtype or method; a `rounding` with "balanced"; an axis that is out of
        range or named twice; a tile that is not positive; for mxfp8, mxfp4 (32) and nvfp4 (16)
        other tiles than the format's own, of one axis or of whole axes and a part of another; a
        `scale_dtype` that the format can't have.
      TypeError: `x` is not of a supported float dtype.
    """
    kind = get_qtype(qtype).with_scales(scale_dtype)
    how = parse_calibration_method(method)
    x = jnp.asarray(x)
    dtype = float_dtype(x.dtype, "the array to quantize")
    cut = slices(x.shape, channel_axes, tile_axes)
    check_block(kind, cut)
    if how.name == "balanced" and rounding is not None:
        raise ValueError(
            "rounding must be None with the method 'balanced', which decides how values are "
            f"rounded, got {rounding!r}. Use 'absmax'."
        )

    def quantized(x: jax.Array, noise: jax.Array | None) -> QArray:
        values = cut.split(x.astype(compute_dtype(dtype)))
        lower, upper = bounds(values, cut, how, kind)
        scale, zero_point, outer = scale_of(Calibration(lower, upper), kind)
        noise = None if noise is None else cut.split(noise)
        qvalue = encode(values, whole_scale(scale, outer), kind, zero_point, noise)
        if how.name == "balanced" and values.size:
            qvalue = _balanced(values, scale, qvalue, cut)
        return QArray(
            cut.join(qvalue),
            scale.reshape(cut.scale_shape),
            None if zero_point is None else zero_point.reshape(cut.scale_shape),
            None if outer is None else outer.reshape((1,) * x.ndim),
            qtype=kind.name,
            dtype=dtype,
            ragged_tiles=cut.ragged,
        )

    return sharded_like(quantized, x, x, None if rounding is None else rounding.noise(x.shape))


# What `_balanced` compares values by has 30 bits, so that an int32 holds it: the error, of up to
# half a step, above the place in the slice, which tells equal errors apart. Few slices are longer
# than 2**13 values, and float32 has quotients near 127 in units of 2**-17 of a step.
_PLACE_BITS = 13
_ERROR_BITS = 30 - _PLACE_BITS


def _balanced(values: jax.Array, scale: jax.Array, qvalue: jax.Array, cut: Slices) -> jax.Array:
    """Round the values of each slice so that their errors sum to at most half a step.

    The number of values that are moved by a step is the nearest to the sum of errors. They are
    those whose errors are largest, which then are less than a step; of equal ones the first. The
    least of them is found by bisection over the bits of an integer, as a percentile is: that takes
    a pass over the values for each bit, and sorting takes XLA longer.

    Args:
      values: split by ``cut.split``.
      scale: of each slice.
      qvalue: nearest values, of the shape of `values`.
      cut: the slices.
    """
    reduced = cut.reduced
    numbers = qvalue.astype(values.dtype)
    error = numbers - values / scale.astype(values.dtype)
    total = lax.expand_dims(lax.reduce_sum(error, reduced), reduced)
    total = lax.select(lax.is_finite(total), total, lax.full_like(total, 0))
    count = lax.round(total, lax.RoundingMethod.TO_NEAREST_EVEN).astype(jnp.int32)
    side = lax.sign(count)
    # Errors in the order of integers, all different within a slice of up to 2**13 values: those
    # that come first are larger. Beyond, values with equal errors may be moved together.
    place = jnp.zeros((1,) * values.ndim, jnp.int32)
    for axis in reduced:
        place = place * values.shape[axis] + lax.broadcasted_iota(
            jnp.int32, [n if a == axis else 1 for a, n in enumerate(values.shape)], axis
        )
    most = 2**_PLACE_BITS - 1
    wide = lax.clamp(0.0, error * side.astype(error.dtype), 0.5) * 2**_ERROR_BITS
    key = (wide.astype(jnp.int32) << _PLACE_BITS) + (most - (place & most))

    def step(i: jax.Array, least: jax.Array) -> jax.Array:
        trial = least | (1 << (30 - i))
        reached = (key >= trial).astype(jnp.int32)
        found = lax.expand_dims(lax.reduce_sum(reached, reduced), reduced)
        return jnp.where(found >= lax.abs(count), trial, least)

    # Like `count`, zeros that vary over the devices of a shard_map.
    least = lax.fori_loop(0, 31, step, count - count)
    return qvalue - jnp.where(key >= least, side, 0).astype(qvalue.dtype)


def quantize_with(
    x: ArrayLike,
    qtype: str | DTypeLike,
    scale: jax.Array,
    zero_point: jax.Array | None = None,
    global_scale: jax.Array | None = None,
    rounding: StochasticRounding | None = None,
    *,
    tile_axes: Mapping[int, int] | None = None,
) -> QArray:
    """Quantize with a given scale, whose shape tells the slices.

    What is outside the range saturates, infinities too. A NaN becomes the number nearest to zero,
    or stays NaN in the float8 formats.

    Args:
      x: as in ``quantize``.
      qtype: as in ``quantize``.
      scale: of a scale dtype of the format; same ndim as `x`; each axis 1, the full size, or the
        number of tiles.
      zero_point: as in ``qarray``.
      global_scale: as in ``qarray``.
      rounding: None (to nearest) or a ``StochasticRounding``.
      tile_axes: axis -> tile size; needed only where the last tile of an axis is shorter.

    Raises:
      ValueError, TypeError: parts that do not fit, as ``qarray``; `x` is not a supported float.
    """
    kind = get_qtype(qtype)
    x = jnp.asarray(x)
    dtype = float_dtype(x.dtype, "the array to quantize")
    cut = slices_of(x.shape, scale.shape, ragged_tiles(x.shape, tile_axes or {}))

    def encoded(x: jax.Array, whole: jax.Array, point: Any, noise: Any) -> jax.Array:
        values = cut.split(x.astype(compute_dtype(dtype)))
        point, noise = (None if part is None else cut.split(part) for part in (point, noise))
        return cut.join(encode(values, cut.split(whole), kind, point, noise))

    whole = whole_scale(scale, global_scale)
    noise = None if rounding is None else rounding.noise(x.shape)
    qvalue = sharded_like(encoded, x, x, whole, zero_point, noise)
    return qarray(
        qvalue,
        scale,
        kind.name,
        dtype,
        zero_point=zero_point,
        global_scale=global_scale,
        tile_axes=tile_axes,
    )


def quantize_for_dot(
    x: ArrayLike,
    contracting: Sequence[int],
    qtype: str | DTypeLike,
    tile_size: int | float | None = None,
    *,
    method: str = "absmax",
    rounding: StochasticRounding | None = None,
    channelwise: bool = True,
    scale_dtype: DTypeLike | None = None,
) -> QArray:
    """Quantize one side of a contraction, one scale per non-contracted index.

    Args:
      x: float array of any shape.
      contracting: the contracting axes of `x`, in the order of ``dimension_numbers``.
      qtype: as in ``quantize``.
      tile_size: if given, also one scale per tile of this size along the contracting axes, as if
        they were one axis, flattened in the order of `contracting` (so that both sides, given the
        same `tile_size`, are tiled alike). A float is one over the number of tiles. Formats with
        blocks have their own without it.
      method: as in ``quantize``.
      rounding: as in ``quantize``.
      channelwise: False for one scale for the whole array, or per tile alone.
      scale_dtype: as in ``quantize``.

    Raises:
      ValueError: as ``quantize``; a tile size without a contracting axis, or tiles that begin
        within an axis and end in another index of one before it.
    """
    x = jnp.asarray(x)
    tile = get_qtype(qtype).block if tile_size is None else tile_size
    channels, tiles = dot_granularity(x.shape, contracting, tile, channelwise)
    return quantize(
        x,
        qtype,
        channel_axes=channels,
        tile_axes=tiles,
        method=method,
        rounding=rounding,
        scale_dtype=scale_dtype,
    )


def fake_quant(
    x: ArrayLike,
    qtype: str | DTypeLike,
    *,
    channel_axes: Sequence[int] = (),
    tile_axes: Mapping[int, int | float] | None = None,
    method: str = "absmax",
    rounding: StochasticRounding | None = None,
) -> jax.Array:
    """Return ``dequantize(quantize(x, ...))``, differentiable.

    The derivative is that of clipping to the calibrated range, with the range held constant: the
    identity inside, zero where the method cut data off (Bengio et al. 2013, arXiv:1308.3432, and
    section 3 of arXiv:1712.05877). It works in forward and reverse mode, in any order, under jit,
    vmap, scan and remat.

    Arguments are those of ``quantize``. The result has the shape and dtype of `x`.

    Raises:
      ValueError, TypeError: as ``quantize``.
    """
    x = jnp.asarray(x)
    float_dtype(x.dtype, "the array to quantize")
    granularity: dict[str, Any] = {"channel_axes": channel_axes, "tile_axes": tile_axes}
    clips = parse_calibration_method(method).clips

    # The key comes as an argument: a custom_jvp must not close over tracers.
    @jax.custom_jvp
    def apply(x: jax.Array, rounding: StochasticRounding | None) -> jax.Array:
        return dequantize(quantize(x, qtype, method=method, rounding=rounding, **granularity))

    @apply.defjvp
    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        x, tangent = primals[0], tangents[0]
        if clips:
            fixed = lax.stop_gradient(x)
            found = calibrate(fixed, qtype, method=method, **granularity)
            is_inside = inside(fixed, found, slices(x.shape, **granularity))
            tangent = lax.select(is_inside, tangent, lax.full_like(tangent, 0))
        return apply(*primals), tangent

    return apply(x, rounding)
