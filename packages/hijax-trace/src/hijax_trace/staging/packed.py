"""Packed: a pytree taken apart into arrays and the rest."""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from .. import compat

NUMPY: tuple[type, ...] = (np.ndarray, np.generic)
NUMBERS: tuple[type, ...] = (bool, int, float, complex)


_ONE = jax.tree.structure(0)


class Packed:
    """A pytree taken apart into arrays, each once, and the other leaves.

    Args:
        kinds: types that count as arrays beside JAX's. NumPy arrays count among a program's
            arguments, but may be constants of an operation, such as a convolution's padding.
            Python numbers count among results alone.

    Attributes:
        arrays: the arrays.
        rest: the other leaves.
        treedef: the structure of the pytree.
    """

    __slots__ = ("_first", "_places", "arrays", "rest", "treedef")

    def __init__(self, tree: Any, kinds: tuple[type, ...] = NUMPY):
        leaves, self.treedef = jax.tree.flatten(tree)
        self._fill(leaves, kinds)

    @classmethod
    def of_leaves(cls, leaves: Sequence[Any], treedef: Any, also: type) -> Packed:
        """Return a pytree of these leaves, taken apart without being built.

        Args:
            also: another type that counts as an array, which the classes of the pytree need not
                take.
        """
        self = cls.__new__(cls)
        self.treedef = treedef
        self._fill(leaves, NUMPY, also)
        return self

    def _fill(
        self, leaves: Sequence[Any], kinds: tuple[type, ...], also: type | None = None
    ) -> None:
        self.arrays: list[Any] = []
        self.rest: list[Any] = []
        self._places: list[int | None] = []
        self._first: list[int] = []
        seen: dict[int, int] = {}
        for leaf in leaves:
            if type(leaf) is not also and not _is_array(leaf, kinds):
                self._places.append(None)
                self.rest.append(leaf)
                continue
            place = seen.setdefault(id(leaf), len(self.arrays))
            if place == len(self.arrays):
                self._first.append(len(self._places))
                self.arrays.append(leaf)
            self._places.append(place)

    def build(self, arrays: Sequence[Any]) -> Any:
        """Return the pytree with other arrays."""
        if self.treedef == _ONE and not self.rest:  # as most results are
            return arrays[0]
        rest = iter(self.rest)
        leaves = [next(rest) if place is None else arrays[place] for place in self._places]
        return jax.tree.unflatten(self.treedef, leaves)

    def leaf_of(self, index: int) -> int:
        """Return the number of the first leaf that is array ``index``."""
        return self._first[index]

    def place_of(self, leaf: int) -> int | None:
        """Return the number of the array that leaf ``leaf`` is, or None."""
        return self._places[leaf]

    def forget(self) -> list[Any]:
        """Drop the arrays. Return them."""
        arrays, self.arrays = self.arrays, []
        return arrays

    def key(self) -> tuple | None:
        """Return a key of all but the arrays; None if unhashable."""
        key = (self.treedef, tuple(self._places), tuple(map(_exact, self.rest)))
        try:
            hash(key)
        except TypeError:
            return None
        return key


def stage_packed(
    name: str, fn: Callable[[Sequence[Any]], Any], avals: Sequence[Any]
) -> tuple[Any, list[Any], Packed]:
    """Stage a function of a list of arrays that returns a pytree.

    Returns:
        The open jaxpr, the values of its constants, and the result, whose arrays it returns.
    """
    results: list[Packed] = []

    def flat(*arrays: Any) -> list[Any]:
        results[:] = [Packed(fn(arrays), NUMPY + NUMBERS)]
        return results[0].forget()

    return *compat.stage(flat, avals, compat.named_info(name)), results[0]


def _exact(leaf: Any) -> tuple[type, Any]:
    """Return a key that is equal for leaves of which a function makes the same."""
    # 0.0 equals -0.0, and True equals 1: a program that tells them apart must be staged for each.
    if isinstance(leaf, np.generic):
        return type(leaf), leaf.tobytes()
    return type(leaf), repr(leaf) if isinstance(leaf, float | complex) else leaf


def is_plain(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Return whether a call's arguments consist of arrays and constants alone.

    Other objects, such as a bound flax module or a closure, may hold tracers of the program's
    trace, and the call may change them.
    """
    if not kwargs and all(map(compat.is_plain_array, args)):
        return True
    leaves = jax.tree.leaves((args, kwargs), is_leaf=_is_object)
    return all(_is_array(leaf, ()) or _is_constant(leaf) for leaf in leaves)


def is_iterator(node: Any) -> bool:
    """Return whether a pytree's node is an iterator, for ``is_leaf``.

    JAX warns of an iterator that it takes for a leaf without being told.
    """
    return isinstance(node, Iterator)


def _is_object(node: Any) -> bool:
    """Return whether a pytree's node may be mutable."""
    if isinstance(node, jax.core.Tracer):
        return False
    return _is_object_type(type(node))


@functools.lru_cache(maxsize=256)
def _is_object_type(kind: type) -> bool:
    if issubclass(kind, tuple | list | dict | jax.Array):
        return False
    if not dataclasses.is_dataclass(kind):
        return True
    return not kind.__dataclass_params__.frozen  # pyrefly: ignore[missing-attribute]


_CONSTANTS = (
    *NUMPY,
    *NUMBERS,
    str,
    bytes,
    type,
    np.dtype,
    enum.Enum,
    slice,
    range,
    type(None),
    type(...),
)


def _is_constant(leaf: Any) -> bool:
    if isinstance(leaf, _CONSTANTS):
        return True
    if callable(leaf):
        return _is_global(leaf)
    # Shardings, layouts, dimension numbers and the like: JAX hashes them as constants, too.
    return type(leaf).__module__.split(".")[0] in ("jax", "jaxlib", "ml_dtypes")


def _is_global(function: Any) -> bool:
    """Return whether a function is a global, which closes over nothing."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    found: Any = module
    for part in getattr(function, "__qualname__", "?").split("."):
        found = getattr(found, part, None)
    return found is function or isinstance(function, compat.PjitFunction | jax.custom_jvp)


def _is_array(leaf: Any, kinds: tuple[type, ...]) -> bool:
    if compat.is_plain_array(leaf):
        return True
    if isinstance(leaf, NUMBERS):
        return bool in kinds
    if isinstance(leaf, NUMPY):
        known = leaf.dtype.kind not in "OSUMmT"
        return np.ndarray in kinds and known and leaf.dtype.names is None
    return compat.is_jax_type(leaf) and not compat.is_ref(leaf)
