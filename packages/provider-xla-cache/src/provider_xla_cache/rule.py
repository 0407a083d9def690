"""CacheRule: which arguments of a program are carried quantized. CachePlan: how, or why not."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, ClassVar

import jax
import numpy as np

import quant_numerics as qn

from .array import quantized


@dataclasses.dataclass(frozen=True)
class CacheRule:
    """Carry an argument quantized that a program updates: a KV cache.

    The rule is about float arrays with two axes or more. A plan finds out whether it can be
    followed, and along which axis elements share a scale: see ``Plan.caches``.

    Args:
        argument: name or position of an argument of the function. None for any but the one that
            holds the parameters.
        path: a regular expression, which must match the whole pytree path of an array within its
            argument, such as ``r".*cached_(key|value).*"``. None for any.
        qtype: an integer or float format, symmetric and without blocks.
        tile_size: how many elements share a scale; None for all along the axis, which are those of
            a head if heads have a separate axis. If one axis holds all heads, the size of a head.

    Raises:
        TypeError: ``argument`` or ``tile_size`` has another type.
        ValueError: ``argument`` is not a name, ``path`` not a pattern, ``qtype`` has blocks or is
            a codebook, or ``tile_size`` is below 1.
    """

    feature: ClassVar[str] = "plan-find-caches"

    argument: str | int | None = None
    path: str | None = None
    qtype: str = "int8"
    tile_size: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.argument, str | int | None) or isinstance(self.argument, bool):
            raise TypeError(
                f"argument must be a name, a position or None, got {self.argument!r}. Write for "
                "example CacheRule('cache')."
            )
        if isinstance(self.argument, str) and not self.argument.isidentifier():
            raise ValueError(
                f"argument must be the name of an argument, got {self.argument!r}. Give a pytree "
                "path as path=."
            )
        if self.path is not None:
            try:
                re.compile(self.path)
            except re.error as error:
                raise ValueError(f"path must be a regular expression, got {error}.") from error
        kind = qn.get_qtype(self.qtype)
        if kind.block is not None or kind.kind == "codebook":
            raise ValueError(
                f"qtype must be an integer or float format without blocks, got {self.qtype!r}. "
                "Use 'int8'."
            )
        if self.tile_size is not None and (
            not isinstance(self.tile_size, int) or isinstance(self.tile_size, bool)
        ):
            raise TypeError(f"tile_size must be an int or None, got {self.tile_size!r}.")
        if self.tile_size is not None and self.tile_size < 1:
            raise ValueError(f"tile_size must be at least 1, got {self.tile_size}.")

    def matches(self, argument: str | int, name: str | None, path: str, params: int) -> bool:
        """Return whether the rule is about an array.

        Args:
            argument: position of the argument that holds it, or the name if it has no position.
            name: name of that argument; None if unknown.
            path: the array's path within the argument, ``""`` for the argument itself.
            params: the position of the argument that holds the parameters.
        """
        if self.argument is None and argument == params:
            return False
        if self.argument is not None and self.argument not in (argument, name):
            return False
        return self.path is None or re.fullmatch(self.path, path) is not None


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
