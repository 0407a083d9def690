"""CacheRule: which arguments of a program are carried quantized."""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

import quant_numerics as qn


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
