"""Fake quantization in plain JAX."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .config import Config

_TINY = np.finfo(np.float32).tiny
_MARKS = np.left_shift(1, np.arange(8)).astype(np.uint8)
"""The bits of a byte, the lowest first."""


def fake_quantize(
    config: Config,
    x: jax.Array,
    terms: jax.Array,
    row: jax.Array,
    seen: jax.Array | None = None,
    *,
    axes: Sequence[tuple[str, ...]] = (),
) -> tuple[jax.Array, ...]:
    """Return the rounded tensor, where it is in its range (see ``packed``), and the range.

    And the table of bounds that were seen, if x is observed.

    Args:
        config: the static arguments.
        x: the tensor, or a device's block of it.
        terms: of all rows.
        row: that of x.
        seen: bounds of all rows.
        axes: for a block, the mesh axes that each axis of x is shared out over.
    """
    sums, weight, sums_before, weight_before, count = _row(terms, row)
    own = _own_bounds(config, config.batch_axes, x, axes or ((),) * x.ndim)
    before = None if seen is None else _row(seen, row)
    if config.observe:
        added = own
        if config.join and before is not None:
            added = jnp.stack([lax.min(before[0], own[0]), lax.max(before[1], own[1])])
    else:
        added = jnp.where(count == 0, own, jnp.float32(jnp.nan))
        added = added if before is None else jnp.where(lax.is_finite(before), before, added)
    wanted = lax.is_finite(added)
    total = lax.select(wanted, sums + np.float32(config.share) * added, sums_before)
    bounds = total / lax.select(wanted, weight, weight_before)
    out = _rounded(config, x, bounds)
    lower, upper = (_spread(bounds, i, x) for i in (0, 1))
    inside = packed(lax.le(lower, x) & lax.le(x, upper), config.bits_axis)
    if not config.observe or seen is None:
        return out, inside, bounds
    place = row, np.int32(0)
    added = lax.dynamic_update_slice(seen, added[None], place, allow_negative_indices=False)
    return out, inside, bounds, added


def packed(holds: jax.Array, axis: int | None) -> jax.Array:
    """Return whether something holds as bits, uint8.

    Args:
        holds: bool of any shape.
        axis: along which eight numbers share a byte, the first in its lowest bit. None: each has a
            byte, 0 or 1.
    """
    if axis is None:
        return holds.astype(jnp.uint8)
    # Not `jnp.packbits`, which takes five times as long to trace, for each shape of a model.
    size, first, last = holds.shape[axis], holds.shape[:axis], holds.shape[axis + 1 :]
    padding = [(0, -size % 8 if i == axis else 0, 0) for i in range(holds.ndim)]
    held = lax.pad(holds.astype(jnp.uint8), np.uint8(0), padding)
    held = lax.reshape(held, (*first, (size + 7) // 8, 8, *last))
    marks = lax.broadcast_in_dim(_MARKS, held.shape, (axis + 1,))
    return lax.reduce_sum(lax.mul(held, marks), (axis + 1,))


def unpacked(bits: jax.Array, axis: int | None, shape: Sequence[int]) -> jax.Array:
    """Return where bits are set, bool of a shape: what was ``packed``."""
    if axis is None:
        return bits != 0
    # Not `jnp.unpackbits`, with which a train step has a tenth more instructions to compile.
    marks = _MARKS.reshape(*(1,) * (axis + 1), 8, *(1,) * (bits.ndim - axis - 1))
    is_set = (jnp.expand_dims(bits, axis + 1) & marks) != 0
    is_set = is_set.reshape(*shape[:axis], 8 * bits.shape[axis], *shape[axis + 1 :])
    return lax.slice_in_dim(is_set, 0, shape[axis], axis=axis)


def shape_of_bits(axis: int | None, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape of what is ``packed``."""
    return tuple((n + 7) // 8 if i == axis else n for i, n in enumerate(shape))


def _row(table: jax.Array, row: jax.Array) -> jax.Array:
    return lax.dynamic_index_in_dim(table, row, 0, False, allow_negative_indices=False)


def _spread(bounds: jax.Array, index: int, x: jax.Array) -> jax.Array:
    """Return a bound in the shape and dtype of a tensor."""
    one = lax.index_in_dim(bounds, index, keepdims=False).astype(x.dtype)
    return lax.broadcast(one, x.shape)


def _own_bounds(
    config: Config, batch: int, x: jax.Array, axes: Sequence[tuple[str, ...]]
) -> jax.Array:
    """Return the mean of the ranges of a tensor's batch indices, float32[2].

    The mapped axis of ``vmap`` is one more of the batch's: all of it has one range.
    """

    @jax.custom_batching.custom_vmap
    def find(x: jax.Array) -> jax.Array:
        zero = np.zeros((), x.dtype)
        over = tuple(range(batch, x.ndim))
        lower, upper = lax.reduce_min(x, over), lax.reduce_max(x, over)
        shared = tuple(itertools.chain(*axes[batch:]))
        if shared:
            lower, upper = lax.pmin(lower, shared), lax.pmax(upper, shared)
        # Not as the initial value of the reductions: XLA leaves that out where a size is 1.
        lower = lax.min(lower, zero).astype(jnp.float32).reshape(-1)
        upper = lax.max(upper, zero).astype(jnp.float32).reshape(-1)
        if config.symmetric:
            upper = lax.max(-lower, upper)
            lower = -upper
        share = np.float32(1 / max(1, math.prod(x.shape[:batch])))
        found = lax.reduce_sum(jnp.stack([lower, upper]) * share, (1,))
        shared = tuple(itertools.chain(*axes[:batch]))
        return lax.pmean(found, shared) if shared else found

    @find.def_vmap
    def rule(size: int, in_batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        del size, in_batched  # it is called where the one argument is batched
        return _own_bounds(config, batch + 1, x, ((), *axes)), False

    return find(x)


def _rounded(config: Config, x: jax.Array, bounds: jax.Array) -> jax.Array:
    """Return a tensor on the grid of its bounds, NaN where it is NaN."""
    high = np.float32(2 ** (config.bits - 1) - 1)
    lower, upper = bounds
    if config.symmetric:
        scale = lax.max(upper * np.float32(1 / high), _TINY)
        least, most = -high, high
    else:
        low, step = -high - 1, np.float32(1) / (2 * high + 1)
        # The difference itself could overflow.
        scale = lax.max(upper * step - lower * step, _TINY)
        point = lax.clamp(low, _nearest(low - lower / scale), high)
        least, most = low - point, high - point
    steps = _nearest(x.astype(jnp.float32) * (1 / scale))
    return (lax.clamp(least, steps, most) * scale).astype(x.dtype)


_nearest = functools.partial(lax.round, rounding_method=lax.RoundingMethod.TO_NEAREST_EVEN)
