"""quantize_int8: scales, random bits and rounding in one call."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from ..batching import more_rows
from ..op import Op
from . import config as checks
from . import reference
from .config import Config


def quantize_int8(
    x: jax.Array,
    factors: jax.Array | None = None,
    noise: jax.Array | None = None,
    key: jax.Array | None = None,
    *,
    by_row: bool,
    low_bits: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Quantize to int8 with a scale for each row or column.

    With numbers ``v = x * factor``, in float32, each scale is ``max(absmax(v) * (1 / 127), the
    smallest normal number)``, and quantized values are ``v * (1 / scale) + noise``, rounded half to
    even, from -127 to 127. So XLA divides by what is broadcast, and these are the bits of
    ``quant_numerics.quantize`` in compiled programs. With an infinity the scale is
    infinite, and quantized values are +-127 at the infinities; with a NaN it is NaN, and they are
    0.

    Args:
        x: float32, bfloat16 or float16 of shape [..., blocks, rows, columns].
        factors: what numbers that share a scale are multiplied with first, float32: by row
            [..., blocks, columns], by column [..., blocks, rows]; or None.
        noise: float32[..., blocks, rows], from -1/2 to 1/2; or None.
        key: uint32[..., 2], to draw noise for each number (stochastic rounding): the words of a
            "threefry2x32" key of JAX. The bits are those of ``jax.random.bits(key, shape)`` with
            ``jax_threefry_partitionable``, for the shape of the last three axes of x, which have
            less than 2**32 numbers.
        by_row: whether the numbers of a row share a scale; else those of a column of a block.
        low_bits: whether noise is of 8 random bits instead of 23.

    Returns:
        Quantized values, int8 of the shape of x, and scales, float32 of shape [..., blocks, rows]
        by row and [..., blocks, columns] by column. It has no derivative.

    Raises:
        TypeError, ValueError: an argument has another dtype or shape than above.
    """
    config = checks.config(x, factors, noise, key, by_row=by_row, low_bits=low_bits)
    given = [one for one in (factors, noise, key) if one is not None]
    return _OP(config, x, *given)


def _results(config: Config, x: jax.Array, *_: jax.Array) -> tuple[Any, ...]:
    scales = config.scale_shape(x)
    return jax.ShapeDtypeStruct(x.shape, jnp.int8), jax.ShapeDtypeStruct(scales, jnp.float32)


def _attributes(config: Config, *_: jax.Array) -> dict[str, Any]:
    return {"by_row": config.by_row, "factors": config.factors, "noise": int(config.noise)}


_OP = Op(
    "quantize_int8",
    reference.quantize_int8,
    results=_results,
    attributes=_attributes,
    batch=more_rows,
)
