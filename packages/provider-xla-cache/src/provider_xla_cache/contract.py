"""Contractions with a cache: of its quantized values, with the scales outside.

Scales differ between positions and heads. Attention contracts the keys' last axis, and keeps
positions: there the result is multiplied with the scales. It contracts the values' positions: there
the other operand is. Both are as large as one row of the cache, or a few, so that no float copy of
the cache is made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

import quant_numerics as qn


class Roles(NamedTuple):
    """What the axes of one side of a contraction are.

    Attributes:
        contracted: the axes that are summed over.
        batch: those that both sides have.
        free: the others.
    """

    contracted: tuple[int, ...]
    batch: tuple[int, ...]
    free: tuple[int, ...]


def roles_of(params: Mapping[str, Any], side: int, ndim: int) -> Roles:
    """Return the roles of the axes of an operand of ``dot_general``."""
    contracted, batch = (tuple(map(int, axes[side])) for axes in params["dimension_numbers"])
    free = tuple(axis for axis in range(ndim) if axis not in (*contracted, *batch))
    return Roles(contracted, batch, free)


def contract(
    cache: qn.QArray, params: Mapping[str, Any], operands: Sequence[Any]
) -> list[jax.Array] | None:
    """Return a ``dot_general``'s result; None if scales vary along too many axes."""
    side = next(i for i, operand in enumerate(operands) if operand is cache)
    other = operands[1 - side]
    if isinstance(other, qn.QArray):
        other = other.restore()
    roles = roles_of(params, side, cache.qvalue.ndim)
    theirs = roles_of(params, 1 - side, other.ndim)
    scale = cache.scale
    varies = {axis for axis, size in enumerate(scale.shape) if size > 1}
    inside = not varies.isdisjoint(roles.contracted)
    if inside and not varies.isdisjoint(roles.free):
        return None
    preferred = params["preferred_element_type"]
    dtype = other.dtype if preferred is None else jnp.dtype(preferred)
    compute = jnp.float32 if other.dtype == jnp.float16 else other.dtype
    if inside:
        pairs = [
            *zip(roles.contracted, theirs.contracted, strict=True),
            *zip(roles.batch, theirs.batch, strict=True),
        ]
        factors = _arranged(cache, dict(pairs), other.ndim)
        other = (other.astype(scale.dtype) * factors).astype(compute)
    values = cache.qvalue.astype(compute)
    lhs, rhs = (other.astype(compute), values) if side else (values, other.astype(compute))
    # Sums of unscaled values may be beyond the range of 16-bit floats.
    wide = dtype if jnp.finfo(dtype).bits > 32 else scale.dtype
    out = lax.dot_general(
        lhs,
        rhs,
        params["dimension_numbers"],
        precision=params["precision"],
        preferred_element_type=wide,
        out_sharding=params.get("out_sharding"),
    )
    if not inside:
        first = len(roles.batch) + (len(theirs.free) if side else 0)
        places = dict(zip(roles.batch, range(len(roles.batch)), strict=True))
        places |= dict(zip(roles.free, range(first, first + len(roles.free)), strict=True))
        out = out * _arranged(cache, places, out.ndim)
    return [out.astype(dtype)]


def _arranged(cache: qn.QArray, places: Mapping[int, int], ndim: int) -> jax.Array:
    """Return the scales with axes permuted, and size 1 along the others."""
    scale = cache.slices.repeated(cache.scale, list(places))
    gone = [axis for axis in range(scale.ndim) if axis not in places]
    kept = [axis for axis in range(scale.ndim) if axis in places]
    scale = lax.squeeze(scale, gone)
    scale = lax.transpose(scale, sorted(range(len(kept)), key=lambda i: places[kept[i]]))
    sizes = [1] * ndim
    for axis, size in zip(sorted(places.values()), scale.shape, strict=True):
        sizes[axis] = size
    return lax.reshape(scale, sizes)
