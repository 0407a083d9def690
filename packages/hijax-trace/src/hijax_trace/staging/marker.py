"""Markers: how the call of a named function stays visible in a jaxpr.

While a program is staged, the call of a targeted function becomes the call of a jaxpr under the
function's name, as a jitted function's does. Its name, a string of a class of its own, holds
what is needed to call the function's handler with the arguments that it was called with.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import sys
import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from interception_core import OpCall, TargetError

from .. import compat

NUMPY: tuple[type, ...] = (np.ndarray, np.generic)
NUMBERS: tuple[type, ...] = (bool, int, float, complex)


class Packed:
    """A pytree taken apart into arrays, each once, and what isn't one.

    Args:
        tree: the pytree.
        kinds: what counts as an array beside JAX's own. NumPy's do among a program's arguments,
            but may be constants among those of an operation (a convolution's padding); Python's
            numbers do among results alone.
    """

    __slots__ = ("_first", "_places", "arrays", "rest", "treedef")

    def __init__(self, tree: Any, kinds: tuple[type, ...] = NUMPY):
        leaves, self.treedef = jax.tree.flatten(tree)
        self.arrays: list[Any] = []
        self.rest: list[Any] = []
        self._places: list[int | None] = []
        self._first: list[int] = []
        seen: dict[int, int] = {}
        for leaf in leaves:
            if not _is_array(leaf, kinds):
                self._places.append(None)
                self.rest.append(leaf)
                continue
            if id(leaf) not in seen:
                seen[id(leaf)] = len(self.arrays)
                self._first.append(len(self._places))
                self.arrays.append(leaf)
            self._places.append(seen[id(leaf)])

    def build(self, arrays: Sequence[Any]) -> Any:
        """Return the pytree with other arrays."""
        rest = iter(self.rest)
        leaves = [next(rest) if place is None else arrays[place] for place in self._places]
        return jax.tree.unflatten(self.treedef, leaves)

    def leaf_of(self, index: int) -> int:
        """Return the number of the leaf that array ``index`` is first found at."""
        return self._first[index]

    def forget(self) -> list[Any]:
        """Let go of the arrays. Return them."""
        arrays, self.arrays = self.arrays, []
        return arrays

    def key(self) -> tuple | None:
        """Return a hashable that is equal where all but the arrays is; None if there's none."""
        key = (self.treedef, tuple(self._places), tuple((type(x), x) for x in self.rest))
        try:
            hash(key)
        except TypeError:
            return None
        return key


def is_plain(tree: Any) -> bool:
    """Return whether a call's arguments can be told by their arrays and constants.

    Other objects (a bound flax module, a closure) may hold values of the trace that the program
    is staged in, or be changed by the call.
    """
    leaves = jax.tree.leaves(tree, is_leaf=_is_object)
    return all(_is_array(leaf, ()) or _is_constant(leaf) for leaf in leaves)


def _is_object(node: Any) -> bool:
    """Whether a node of a pytree may be more than its parts: it isn't known to be unchangeable."""
    if isinstance(node, jax.core.Tracer):
        return False
    return _is_object_type(type(node))


@functools.lru_cache(maxsize=256)
def _is_object_type(kind: type) -> bool:
    if issubclass(kind, tuple | list | dict | jax.Array):
        return False
    return not (dataclasses.is_dataclass(kind) and _is_frozen(kind))


def _is_frozen(kind: type) -> bool:
    return kind.__dataclass_params__.frozen  # pyrefly: ignore[missing-attribute]


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
    # Shardings, layouts, dimension numbers and the like: values that JAX itself hashes.
    return type(leaf).__module__.split(".")[0] in ("jax", "jaxlib", "ml_dtypes")


def _is_global(function: Any) -> bool:
    """Whether a function is what its module calls by that name, and so closes over nothing."""
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


@dataclass(eq=False, slots=True)
class Marker:
    """The staged call of a function. What it does is the jaxpr of its equation.

    Attributes:
        owner: whose target it is; see ``Tapping``.
        op_name: the target's last name.
        site: what is called.
        function: the function, as whoever is active when it is called will see it.
        packed: its arguments, a pair of ``args`` and ``kwargs``.
        results: its result.
        extra: how many leading inputs of that are no arguments, but values closed over.
    """

    owner: Hashable
    op_name: str
    site: Any
    function: Callable[..., Any]
    packed: Packed
    results: Packed
    extra: int


class MarkerName(str):
    """The name of a marker's equation."""

    # A cache of JAX's has the names of equations for as long as their jaxprs live.
    __slots__ = ("jaxpr", "marker")
    jaxpr: Callable[[], Any]
    marker: Marker

    @classmethod
    def of(cls, marker: Marker, jaxpr: Any) -> MarkerName:
        """Return the name of the call of ``jaxpr`` that ``marker`` is."""
        name = cls(marker.op_name)
        name.jaxpr, name.marker = weakref.ref(jaxpr), marker
        return name


def marker_of(eqn: Any) -> Marker | None:
    """Return the marker that an equation is, or None for any other.

    A marker that was differentiated or batched is an ordinary call of that name.
    """
    return marker_in(eqn.primitive, eqn.params)


def marker_in(primitive: Any, params: dict[str, Any]) -> Marker | None:
    """Return the same of what is about to be an equation."""
    if primitive is not compat.jit_p:
        return None
    name = params["name"]
    if type(name) is not MarkerName or name.jaxpr() is not params["jaxpr"]:
        return None
    return name.marker


class Markers:
    """Puts markers into jaxprs that are being built.

    Args:
        owner: whose targets they stand for.
    """

    def __init__(self, owner: Hashable):
        self._owner = owner
        self._known: dict[Hashable, tuple[Marker, Any]] = {}

    def stage(
        self,
        context: Hashable,
        op_name: str,
        site: Any,
        function: Callable[..., Any],
        body: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Stage one call. Return its result.

        Args:
            context: what stands for JAX's configuration.
            op_name: the target's last name.
            site: what is called.
            function: see ``Marker``.
            body: called with the arguments, to be staged.
            args: the positional arguments.
            kwargs: the keyword arguments.
        """
        packed = Packed((args, kwargs), ())
        values = packed.arrays
        key = key_of(context, site, packed)
        known = None if key is None else self._known.get(key)
        more: list[Any] = []
        if known is None:
            avals = tuple(map(compat.typeof, values))
            known, consts, more = self._make(op_name, site, function, body, packed, avals)
            if key is not None and not consts:
                self._known[key] = known
        marker, jaxpr = known
        out = compat.named_call(MarkerName.of(marker, jaxpr), jaxpr, [*more, *values])
        return marker.results.build(out)

    def _make(
        self,
        op_name: str,
        site: Any,
        function: Callable[..., Any],
        body: Callable[..., Any],
        packed: Packed,
        avals: Sequence[Any],
    ) -> tuple[tuple[Marker, Any], list[Any], list[Any]]:
        results: Packed | None = None

        def flat(*arrays: Any) -> list[Any]:
            nonlocal results
            args, kwargs = packed.build(arrays)
            results = Packed(body(*args, **kwargs), NUMPY + NUMBERS)
            return results.forget()

        info = compat.named_info(op_name)
        jaxpr, consts = compat.stage(flat, avals, info)
        assert results is not None
        jaxpr, more = hoisted(jaxpr, consts)
        packed.forget()
        marker = Marker(self._owner, op_name, site, function, packed, results, len(more))
        return (marker, jaxpr), consts, more


def key_of(context: Hashable, site: Any, packed: Packed) -> Hashable | None:
    """Return what equal calls of a function have in common that do the same; None if unknown.

    Args:
        context: what stands for JAX's configuration.
        site: what is called.
        packed: its arguments.
    """
    if not _is_pure(site.subject, packed):
        return None
    rest = packed.key()
    avals = tuple(map(compat.typeof, packed.arrays))
    return None if rest is None else (site, context, avals, rest)


def _is_pure(subject: Any, packed: Packed) -> bool:
    """Return whether equal calls of a function do the same, as JAX's own do, and jitted ones.

    Others may depend on what they close over or are bound to, and those that are given
    functions on what these do.
    """
    if not isinstance(subject, compat.PjitFunction) and not _is_jaxs(subject):
        return False
    return not any(callable(leaf) and not isinstance(leaf, type) for leaf in packed.rest)


def _is_jaxs(subject: Any) -> bool:
    return getattr(subject, "__globals__", {}).get("__name__", "").split(".")[0] == "jax"


def hoisted(
    jaxpr: Any, consts: list[Any], always: bool = False, is_open: bool = False
) -> tuple[Any, list[Any]]:
    """Return a jaxpr, closed unless ``is_open``, and the values of its new leading inputs.

    Those are the constants, if one of them is no plain array (but a value of a trace, or a Ref),
    or ``always``.
    """
    plain = not any(isinstance(const, compat.Tracer) or compat.is_ref(const) for const in consts)
    if plain and not always:
        return compat.with_consts(jaxpr, consts), []
    jaxpr = compat.consts_as_args(jaxpr)
    return (jaxpr if is_open else compat.like_closed(jaxpr)), list(consts)


def check_result(call: OpCall, result: Any, expected: Packed, avals: Sequence[Any]) -> list[Any]:
    """Return the arrays of a handler's result.

    Raises:
        TargetError: the result is not of the structure, shapes and dtypes of the original's,
            on which the staged program was built.
    """
    packed = Packed(result, NUMPY + NUMBERS)
    if packed.treedef != expected.treedef:
        raise TargetError(
            f"The handler of {call.op_id} returned {packed.treedef}, but the operation returns "
            f"{expected.treedef}. Return a result of the same structure."
        )
    leaves = jax.tree.leaves(result)
    values = [leaves[expected.leaf_of(i)] for i in range(len(avals))]
    for value, aval in zip(values, avals, strict=True):
        check_value(call, value, aval)
    return values


def check_value(call: OpCall, value: Any, aval: Any) -> None:
    """Raise TargetError unless ``value`` has the shape and dtype of ``aval``."""
    if not compat.is_jax_type(value):
        raise TargetError(
            f"The handler of {call.op_id} returned {value!r}, which is no array. Return an array "
            f"of type {aval.str_short()}, or NotImplemented to let the operation run."
        )
    given = compat.typeof(value)
    if not compat.same_type(given, aval):
        raise TargetError(
            f"The handler of {call.op_id} returned {given.str_short()}, but the rest of the "
            f"program was traced for {aval.str_short()}. Convert the result to that type."
        )
