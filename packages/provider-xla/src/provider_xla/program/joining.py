"""Functions that compute what a program does with their result as well."""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Generic, Self, TypeVar

import jax
import numpy as np

T = TypeVar("T", bound=Hashable)


class Joining(Generic[T]):
    """A family of jitted functions, one for each static argument.

    A kernel can add a bias as it stores its result. The program adds it in a separate
    operation: hijax-trace asks the name of the function that made the operand for the sum. See
    "Joins" in the README of its interpreter.

    Args:
        name: the name of the functions.
        run: called as ``run(static, *arrays)``.
        join: called as ``join(static, primitive, is_row, is_whole)`` for an operation on the result
            and one more array: whether that is ``[n]``, and whether it has the result's shape. Both
            are true if the result is a vector. Returns the static argument of the function that
            also computes this, given the array last; or None.
        cut: called as ``cut(static, primitive, numbers)`` for "max", "min" or "clamp" of the result
            and numbers. Returns the static argument of the function that also does this, or None.

    Attributes:
        of: returns the function of a static argument.
        static: returns the static argument of the function of a name; None for another family's.
        join: as given.
        cut: as given.
    """

    def __init__(
        self,
        name: str,
        run: Callable[..., jax.Array],
        join: Callable[[T, str, bool, bool], T | None],
        cut: Callable[[T, str, Sequence[float]], T | None] = lambda *_: None,
    ):
        self.join, self.cut = join, cut
        self._name, self._run = name, run
        self.of = functools.lru_cache(maxsize=4096)(self._of)

    def static(self, name: str) -> T | None:
        """Return the static argument of the function that has a name."""
        is_own = isinstance(name, _Name) and name._family is self
        return name._static if is_own else None  # pyrefly: ignore[missing-attribute]

    def _of(self, static: T) -> Callable[..., jax.Array]:
        """Return the function of a static argument."""

        def run(*arrays: jax.Array) -> jax.Array:
            return self._run(static, *arrays)

        run.__name__ = _Name(self._name, self, static)
        return jax.jit(run)


class _Name(str):
    """The ``__name__`` of such a function."""

    _family: Joining[Any]
    _static: Any

    def __new__(cls, name: str, family: Joining[Any], static: Any) -> Self:
        self = super().__new__(cls, name)
        self._family, self._static = family, static
        return self

    def joined(
        self,
        primitive: str,
        params: Mapping[str, Any],
        operands: Sequence[Any],
        which: int,
        call: Sequence[Any],
    ) -> Any:
        """Return the result of an operation on the function's, or NotImplemented."""
        numbers = [float(x) for x in operands if isinstance(x, np.generic)]
        if numbers and len(numbers) == len(operands) - 1:
            cut = self._family.cut(self._static, primitive, numbers)
            return NotImplemented if cut is None else self._family.of(cut)(*call)
        if len(operands) != 2:
            return NotImplemented
        other = operands[1 - which]
        of = other.ndim == 1, other.ndim == operands[which].ndim
        more = self._family.join(self._static, primitive, *of)
        return NotImplemented if more is None else self._family.of(more)(*call, other)
