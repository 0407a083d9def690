"""CachePlan: how an argument is carried quantized, or why it stays float."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import numpy as np

import quant_numerics as qn

from .array import quantized


@dataclasses.dataclass(frozen=True)
class CachePlan:
    """One array among the arguments that a ``CacheRule`` is about.

    Attributes:
        path: its pytree path, such as ``args[2]['k']``.
        shape: its shape.
        dtype: its float dtype.
        qtype: the format that the rule asks for.
        axis: along which elements share a scale; None if it stays float.
        tile_size: how many elements share a scale; None for all along the axis.
        contractions: how many contractions take the quantized values.
        is_updated: whether the program writes to it.
        reason: why it stays float; None if it is carried quantized.
    """

    path: str
    shape: tuple[int, ...]
    dtype: np.dtype
    qtype: str
    axis: int | None = None
    tile_size: int | None = None
    contractions: int = 0
    is_updated: bool = False
    reason: str | None = None

    @property
    def bytes_before(self) -> int:
        """Bytes of the float array."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def bytes_after(self) -> int:
        """Bytes of quantized values and scales; of the float array without them."""
        if self.axis is None:
            return self.bytes_before
        abstract = jax.ShapeDtypeStruct(self.shape, self.dtype)
        return qn.QArray.nbytes.fget(jax.eval_shape(self.quantize, abstract))  # type: ignore

    def quantize(self, array: Any) -> Any:
        """Return an array of this shape as it is carried.

        Args:
            array: float, or what is carried already.
        """
        if self.axis is None or isinstance(array, qn.QArray):
            return array
        return quantized(array, self.qtype, self.axis, self.tile_size)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        fields = dataclasses.asdict(self) | {"shape": list(self.shape), "dtype": self.dtype.name}
        return fields | {"bytes_before": self.bytes_before, "bytes_after": self.bytes_after}

    def __str__(self) -> str:
        shown = f"{self.path} {self.dtype.name}{list(self.shape)}"
        if self.axis is None:
            return f"{shown} stays float: {self.reason}"
        sizes = " -> ".join(f"{n / 2**20:.2f} MiB" for n in (self.bytes_before, self.bytes_after))
        tile = "" if self.tile_size is None else f" in tiles of {self.tile_size}"
        return (
            f"{shown} -> {self.qtype} along axis {self.axis}{tile}: {sizes}, "
            f"{'updated' if self.is_updated else 'read alone'}, {self.contractions} contractions"
        )
