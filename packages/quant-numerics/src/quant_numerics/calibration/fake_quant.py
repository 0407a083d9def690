"""Fake quantization: round trips through a format, with straight-through derivatives."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from quant_numerics.array.operand import dequantize
from quant_numerics.array.tiles import slices
from quant_numerics.calibration.calibrate import calibrate, inside
from quant_numerics.calibration.method import parse_calibration_method
from quant_numerics.calibration.quantize import quantize
from quant_numerics.formats.dtypes import float_dtype
from quant_numerics.formats.rounding import StochasticRounding


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

    Args:
      x: as in ``quantize``, like all arguments.
      qtype: the same.
      channel_axes: the same.
      tile_axes: the same.
      method: the same.
      rounding: the same.

    Returns:
      Array of the shape and dtype of `x`.

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
