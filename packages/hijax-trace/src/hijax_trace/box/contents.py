"""Contents: what a Box holds at one time, one reference per leaf; their type, and who changes it.

The references are JAX's (``jax.new_ref``), so reads and writes are ordinary operations under every
transformation. Contents of another type need new references: a new ``Contents``.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import jax

from .. import compat
from . import guard, scope


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


class Contents:
    """References and their structure. Compared by identity.

    New contents that a function under ``hijax_trace.jit`` returns are ``pending``: plain values
    until a loop or an inner jit uses them. References that are made inside of a program would be
    mapped with it, and the Box is not.

    Args:
        refs: a reference for each leaf; None for pending contents.
        constant: whether programs that make it may not differentiate it, if it is known.
        weak: whether each leaf counts as a Python number, as what was set where the Box was made.
            References have no weak types. Programs that were traced keep this.
    """

    __slots__ = (
        "__weakref__",
        "_constant",
        "_refs",
        "_type",
        "pending",
        "treedef",
        "values",
        "weak",
    )

    def __init__(
        self,
        treedef: Any,
        refs: tuple | None,
        type_: BoxType | None = None,
        constant: bool | None = None,
        weak: tuple[bool, ...] = (),
    ):
        self.weak = weak
        self.treedef = treedef
        self._refs = refs
        self._type = type_
        self._constant = constant
        self.values: list | None = None
        self.pending = False

    @classmethod
    def of(cls, leaves: list, type_: BoxType, constant: bool) -> Contents:
        """Return contents with new references, made in the current trace."""
        refs = tuple(compat.new_ref(leaf, constant) for leaf in leaves)
        return cls(type_.treedef, refs, type_, constant, _weak(leaves))

    @classmethod
    def to_come(cls, leaves: list, type_: BoxType) -> Contents:
        """Return pending contents."""
        contents = cls(type_.treedef, None, type_, constant=True)
        contents.values, contents.pending = leaves, True
        return contents

    @property
    def refs(self) -> tuple:
        """The references. Those of pending contents are made in the current trace."""
        if self._refs is None:
            assert self.values is not None
            self._refs = tuple(compat.new_ref(value, self.constant) for value in self.values)
            self.values, self.weak = None, _weak(self.values)
        return self._refs

    @property
    def type(self) -> BoxType:
        """The type of the contents."""
        # Found when it is asked for: JAX rebuilds Boxes with leaves that have no type.
        if self._type is None:
            avals = tuple(jax.typeof(ref).inner_aval for ref in self.refs)
            self._type = BoxType(self.treedef, avals)
        return self._type

    @property
    def constant(self) -> bool:
        """Whether the contents are not differentiated by programs that make them."""
        if self._constant is None:  # as for the type
            self._constant = any(map(compat.is_constant_ref, self.refs))
        return self._constant

    def lies_like(self, leaves: list) -> bool:
        """Return whether values have the types and devices of these contents."""
        return all(
            jax.typeof(leaf).strip_weak_type() == jax.typeof(ref).inner_aval
            and (isinstance(leaf, jax.core.Tracer) or _place(leaf) in (None, _place(ref)))
            for leaf, ref in zip(leaves, self.refs, strict=True)
        )

    def leaves(self) -> list:
        """Read each reference."""
        if self.values is not None:
            return list(self.values)
        pairs = zip(self.refs, self.weak, strict=True)
        return [compat.with_weak_type(ref[...], weak) for ref, weak in pairs]

    def read(self) -> Any:
        """Return the value."""
        return jax.tree.unflatten(self.treedef, self.leaves())

    def write(self, leaves: list, passed: bool, decides: bool = True) -> None:
        """Write values of the same types to the references.

        Raises:
            TypeError: a value differs among the devices of a ``shard_map``, and the reference is
                one for all.
        """
        refs = self.refs
        traced = not compat.is_eval(compat.current_trace())
        if decides:
            self.weak = _weak(leaves)
        for ref, leaf in zip(refs, leaves, strict=True):
            if traced and not _varying(jax.typeof(leaf)) <= _varying(jax.typeof(ref).inner_aval):
                raise TypeError(guard.VARYING)
            if traced and (passed or self.constant or compat.trace_of(ref) is None):
                leaf = guard.written.bind(leaf, ref)
            ref[...] = leaf


def _varying(aval: Any) -> frozenset[str]:
    """Return the mesh axes of a ``shard_map`` along which values of a type differ, if known."""
    return frozenset(getattr(getattr(aval, "mat", None), "varying", ()))


def _weak(leaves: list) -> tuple[bool, ...]:
    return tuple(getattr(jax.typeof(leaf), "weak_type", False) for leaf in leaves)


def _place(value: Any) -> Any:
    return getattr(value, "sharding", None)


def flatten(value: Any) -> tuple[list, BoxType]:
    """Return a value's leaves and its type as contents of a Box.

    Raises:
        TypeError: the value can't be held.
    """
    local = scope.LOCAL
    before, local.none_expected = local.none_expected, True
    try:
        leaves, treedef = jax.tree.flatten(value)
    except scope.BoxFound:
        raise TypeError(
            "The contents of a Box must be arrays, numbers and values of hi types, got a Box in "
            "them. Put what that holds there, box.get(), or keep both Boxes side by side."
        ) from None
    finally:
        local.none_expected = before
    return leaves, BoxType(treedef, tuple(map(leaf_type, leaves)))
