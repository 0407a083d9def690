"""CacheArray: a cache as quantized values and scales that a program updates and contracts with.

Scales differ between positions and heads. Attention contracts the keys' last axis, and keeps
positions: there the result is multiplied with the scales. It contracts the values' positions: there
the other operand is. Both are as large as one row of the cache, or a few, so that no float copy of
the cache is made.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax import lax

import quant_numerics as qn
from interception_core import hide_frames

hide_frames(Path(__file__).parent)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class CacheArray(qn.QArray):
    """A float cache as quantized values and scales; a pytree.

    A function that a plan was applied to takes it where the program takes a cache, and returns
    it where the program returns that. An update quantizes what it writes, and nothing else. The
    attributes are those of a ``quant_numerics.QArray``, whose ``restore`` returns the float array.
    """

    is_carried = True

    @classmethod
    def of(cls, q: qn.QArray, **others: Any) -> Self:
        """Return a QArray as a cache; `others` are fields that a subclass adds."""
        fields = {one.name: getattr(q, one.name) for one in dataclasses.fields(qn.QArray)}
        return cls(**fields, **others)

    def encode(self, array: Any, axes: Sequence[int | None]) -> CacheArray:
        """Return new elements, quantized with scales as fine as this cache's.

        Args:
            array: float array of the new elements.
            axes: for each of its axes, the axis of the cache that it goes along; None for none.
        """
        channels, tiles = [], {}
        for place, axis in enumerate(axes):
            size = 1 if axis is None else self.shape[axis]
            groups = 1 if axis is None else self.scale.shape[axis]
            if groups == size:
                channels.append(place)
            elif groups > 1:
                tiles[place] = size // groups
        # Rounding has no gradient, and one through the scales alone would mean nothing.
        array = jax.lax.stop_gradient(array)
        new = qn.quantize(array, self.qtype, channel_axes=channels, tile_axes=tiles)
        fields = {one.name: getattr(new, one.name) for one in dataclasses.fields(new)}
        return dataclasses.replace(self, **fields)  # a subclass keeps what it adds

    def computed(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any] | None:
        """Return a contraction of the quantized values, which is scaled outside."""
        return contract(self, params, operands) if primitive == "dot_general" else None


# Programs were exported with it when it was a part of provider-xla.
qn.register_serialization(CacheArray, name="provider_xla.CacheArray")


def quantized(array: Any, qtype: str, axis: int, tile_size: int | None = None) -> CacheArray:
    """Return a cache quantized along one axis, of which ``tile_size`` elements share a scale."""
    channels = [i for i in range(array.ndim) if i != axis]
    tiles = {} if tile_size is None else {axis: tile_size}
    return CacheArray.of(qn.quantize(array, qtype, channel_axes=channels, tile_axes=tiles))


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
