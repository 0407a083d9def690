"""The rule of grouped_gemm_v2 for vmap."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..quantize.modes import ScalingMode
from .config import GroupedConfig


def more_rows_per_group(
    run: Any, config: GroupedConfig, size: int, in_batched: Sequence[bool], *operands: jax.Array
) -> Any:
    """Give each group the rows of all mapped lhs.

    NotImplemented, which runs the op index by index, if other operands are mapped, too.
    """
    # Scales of rows or of their blocks are mapped with the rows.
    along = config.mode is ScalingMode.CHANNEL_SCALING or config.mode.is_mx
    alone = tuple(in_batched) == (True, along, *(False,) * 6)
    if not (alone and config.rows and config.first(config.left)):
        return NotImplemented

    def merged(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        moved = jnp.moveaxis(x.reshape(size, *shape), 0, 1)
        return moved.reshape(shape[0] * size, *shape[1:])

    lhs, scales, *rest = operands
    rest[3] = rest[3] * size
    wide = merged(lhs, config.left.shape)
    if along:
        scales = merged(scales, config.scale_shapes[0])
    left = dataclasses.replace(config.left, shape=wide.shape)
    found = run(dataclasses.replace(config, left=left), wide, scales, *rest)
    apart = found.reshape(config.length, size, *config.shape[1:])
    return jnp.moveaxis(apart, 1, 0), True
