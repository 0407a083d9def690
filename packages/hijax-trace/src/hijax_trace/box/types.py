"""BoxType: the type of a Box's contents, and who changes it."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import jax

from .. import compat


def leaf_type(leaf: Any) -> Any:
    """Return the type of one leaf of a Box's contents, not weak.

    Raises:
        TypeError: the leaf is not a JAX value.
    """
    try:
        if compat.is_ref(leaf):
            raise TypeError
        return jax.typeof(leaf).strip_weak_type()
    except TypeError:
        raise TypeError(
            "The contents of a Box must be arrays, numbers and values of hi types in any pytree, "
            f"got {type(leaf).__name__} {leaf!r}. Keep that outside of the Box, or make it part of "
            "the structure (as a registered static pytree node)."
        ) from None


def _signature(aval: Any) -> Any:
    # The sharding of an array is not a part of the type.
    return aval if aval.is_high else (aval.shape, aval.dtype)


@dataclass(frozen=True, eq=False)
class BoxType:
    """The structure of a Box's contents and the type of each leaf.

    Two types are equal if their structures, shapes, dtypes and hi types are.
    """

    treedef: Any
    avals: tuple

    def _key(self) -> tuple:
        return self.treedef, tuple(map(_signature, self.avals))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BoxType) and self._key() == other._key()

    def __hash__(self) -> int:
        return hash(self._key())

    def __repr__(self) -> str:
        shown = [_Shown(aval.str_short()) for aval in self.avals]
        return f"Box({jax.tree.unflatten(self.treedef, shown)})"


class _Shown(str):
    """A string that prints without quotes."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


_MUT_TYPES: weakref.WeakKeyDictionary[Any, dict[str, BoxType]] = weakref.WeakKeyDictionary()


def record_mut_types(jaxpr: Any, types: dict[str, BoxType]) -> None:
    """Record the new types of Boxes for a program; see ``mut_types``."""
    _MUT_TYPES[jaxpr] = types


def mut_types(jaxpr: Any) -> dict[str, BoxType]:
    """Return the final type of each Box whose type a program changes.

    Args:
        jaxpr: the result of ``hijax_trace.jit(f).trace(*args)``, or its jaxpr. Other programs
            change no type.

    Returns:
        The types, by the place of the Box: a pytree path such as ``args[0]['stats']``, or
        ``closed over[0]``, numbered in the order of first use.
    """
    found = _MUT_TYPES.get(jaxpr) if hasattr(type(jaxpr), "__weakref__") else None
    if found is None:
        inner = getattr(jaxpr, "jaxpr", None)
        found = _MUT_TYPES.get(inner) if inner is not None else None
    return dict(found or {})
