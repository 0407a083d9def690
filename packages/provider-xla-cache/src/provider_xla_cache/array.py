"""CacheArray: a cache as quantized values and scales that a program updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax

import quant_numerics as qn
from interception_core import hide_frames

from .contract import contract

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
