"""What is made once for all calls whose arguments are of one kind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import jax

from ..trees import is_array

T = TypeVar("T")


class ByCall(Generic[T]):
    """Values by the kind of a call's arguments: their structure, types and other values.

    Arrays count by shape and dtype. Other values count by equality. Those that can change are
    compared with a copy of what they were, so that one that has changed is another one.
    """

    def __init__(self) -> None:
        self._found: dict[Any, list[tuple[Any, T]]] = {}

    def get(self, args: tuple, kwargs: dict[str, Any], make: Callable[[], T]) -> T:
        """Return the value for a call, made at the first call of its kind.

        What can't be compared (an object without ``__eq__``) is made at each call.
        """
        leaves, treedef = jax.tree.flatten((args, kwargs))
        types = tuple((tuple(x.shape), str(x.dtype)) for x in leaves if is_array(x))
        known = self._found.setdefault(types, [])
        statics = [None if is_array(x) else x for x in leaves]
        for kind, value in known:
            if _same(kind, (treedef, statics)):
                return value
        value = make()
        try:
            kind = _copied(treedef, leaves), [_own(x) for x in statics]
        except Exception:  # of a class of somebody else's, which can't be copied
            return value
        if _same(kind, (treedef, statics)):
            known.append((kind, value))
        return value


def _same(kind: tuple[Any, list[Any]], other: tuple[Any, list[Any]]) -> bool:
    """Return whether arguments are of one kind. Numbers of different types never are."""
    (treedef, statics), (other_treedef, others) = kind, other
    try:
        return bool(treedef == other_treedef) and all(
            type(one) is type(two) and (one is two or bool(one == two))
            for one, two in zip(statics, others, strict=True)
        )
    except Exception:  # an ``__eq__`` that does not return a bool
        return False


def _copied(treedef: Any, leaves: list[Any]) -> Any:
    """Return a structure whose own values, of classes that hold some, don't change."""
    if _is_hashable(treedef):
        return treedef
    leaves = [jax.ShapeDtypeStruct(x.shape, x.dtype) if is_array(x) else x for x in leaves]
    return jax.tree.structure(copy.deepcopy(jax.tree.unflatten(treedef, leaves)))


def _is_hashable(treedef: Any) -> bool:
    """Return whether a structure's own values are. JAX hashes it without them."""
    node = treedef.node_data()
    try:
        # Those of a dict are a list of its keys.
        hash(None if node is None or issubclass(node[0], dict) else node[1])
    except TypeError:
        return False
    return all(map(_is_hashable, treedef.children()))


def _own(value: Any) -> Any:
    """Return a value as it is now: a copy, if it can change."""
    if callable(value):
        return value
    try:
        hash(value)
    except TypeError:
        return copy.deepcopy(value)
    # Without a separate equality it is equal to itself, whatever it has become.
    return copy.deepcopy(value) if type(value).__eq__ is object.__eq__ else value
