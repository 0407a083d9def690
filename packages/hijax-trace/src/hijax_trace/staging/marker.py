"""Markers: how a tapped function's call stays visible in a jaxpr.

While a program is staged, the call of a tapped function becomes a nested call under the
function's name, as a jitted function's call does. The name is a ``MarkerName``, a string that
holds what the interpreter needs to call the function's handler with the same arguments.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from interception_core import OpCall, TargetError
from interception_core.engine_api import TappedCall

from .. import compat
from .packed import NUMBERS, NUMPY, Packed, stage_packed
from .repeated import again, context_token, keep


@dataclass(eq=False, slots=True)
class Marker:
    """The staged call of a function, whose jaxpr its equation calls.

    Attributes:
        owner: the owner of the target; see ``Tapping``.
        op_name: the last part of the target's name.
        function: the function. Engines that are active when it is called tap it.
        packed: its arguments, the pair of ``args`` and ``kwargs``.
        extra: how many leading inputs of the jaxpr are closed-over values, not arguments.
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

    # Weak, because a cache of JAX keeps names for as long as their jaxprs live.
    __slots__ = ("jaxpr", "marker")
    jaxpr: Callable[[], Any]
    marker: Marker

    @classmethod
    def of(cls, marker: Marker, jaxpr: Any) -> MarkerName:
        """Return the name for the equation of a marker that calls ``jaxpr``."""
        name = cls(marker.op_name)
        name.jaxpr, name.marker = weakref.ref(jaxpr), marker
        return name


def marker_of(eqn: Any) -> Marker | None:
    """Return the marker of an equation, or None for other equations."""
    return marker_in(eqn.primitive, eqn.params)


def marker_in(primitive: Any, params: dict[str, Any]) -> Marker | None:
    """Return the marker that a primitive and parameters are, or None."""
    if primitive is not compat.jit_p:
        return None
    name = params["name"]
    # A marker that was differentiated or batched keeps the name, but calls another jaxpr.
    if type(name) is not MarkerName or name.jaxpr() is not params["jaxpr"]:
        return None
    return name.marker


class Markers:
    """Stages markers."""

    def __init__(self, owner: Hashable):
        self._owner = owner
        self._known: dict[Hashable, tuple[Marker, Any]] = {}

    def again(self, site: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Stage a call that equals one before in the same trace. Return its result.

        NotImplemented if none does.
        """
        key = _quick_key(context_token(), site, args, kwargs)
        known = None if key is None else self._known.get(key)
        if known is None:
            return NotImplemented
        marker, jaxpr = known
        results = again(jaxpr, args)
        return NotImplemented if results is None else marker.results.build(results)

    def stage(
        self,
        context: Hashable,
        call: TappedCall,
        body: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Stage one call as a marker. Return its result.

        Args:
            context: stands for JAX's configuration where it is called, the scope there included.
            body: what is staged: called with the arguments, it does what the function does.
        """
        packed, site = Packed((args, kwargs), ()), call.site
        values, key = packed.arrays, key_of(site, site.subject, packed)
        known, consts, more = None if key is None else self._known.get(key), (), ()
        if known is None:
            avals = tuple(map(compat.typeof, values))
            known, consts, more = self._make(call, body, packed, avals)
        is_kept = key is not None and not consts
        if is_kept:
            self._known[key] = known
            quick = _quick_key(context, site, args, kwargs)
            if quick is not None:
                self._known[quick] = known
        marker, jaxpr = known
        operands = [*more, *values]
        results = again(jaxpr, operands) if is_kept else None
        if results is None:
            results = compat.named_call(MarkerName.of(marker, jaxpr), jaxpr, operands)
            if is_kept:
                keep(jaxpr, operands, results)
        return marker.results.build(results)

    def _make(
        self, call: TappedCall, body: Callable[..., Any], packed: Packed, avals: Sequence[Any]
    ) -> tuple[tuple[Marker, Any], list[Any], list[Any]]:
        def run(arrays: Sequence[Any]) -> Any:
            args, kwargs = packed.build(arrays)
            return body(*args, **kwargs)

        jaxpr, consts, results = stage_packed(call.op_name, run, avals)
        jaxpr, more = hoisted(jaxpr, consts)
        packed.forget()
        what = call.op_name, call.site, call.function
        marker = Marker(self._owner, *what, packed, results, len(more))
        return (marker, jaxpr), consts, more


def _quick_key(
    context: Hashable, site: Hashable, args: tuple, kwargs: dict[str, Any]
) -> Hashable | None:
    """Return a key of a call of different staged arrays alone, which need not be taken apart."""
    if kwargs:
        return None
    types = [site, context]
    for value in args:
        if not compat.is_staged_array(value):
            return None
        types.append(value.aval)
    # Most have one or two. Of more, ids are compared: tracers have no hash.
    if len(args) > 1 and (
        args[0] is args[1] or (len(args) > 2 and len({*map(id, args)}) < len(args))
    ):
        return None
    return tuple(types)


def key_of(site: Hashable, subject: Any, packed: Packed) -> Hashable | None:
    """Return a key that is equal for equal calls in JAX's current configuration, or None."""
    if not _is_pure(subject, packed):
        return None
    rest = packed.key()
    avals = tuple(map(compat.typeof, packed.arrays))
    return None if rest is None else (site, compat.trace_context(), avals, rest)


def _is_pure(subject: Any, packed: Packed) -> bool:
    """Return whether equal calls of a function do the same.

    They do if JAX defines or jits the function and no argument is a function. Other functions may
    depend on what they close over or are bound to.
    """
    # JAX makes what `jax.vmap` and the like return, too, but names the program's module in it.
    made = getattr(subject, "__globals__", {}).get("__name__")
    modules = made, getattr(subject, "__module__", None)
    is_own = all(str(module).split(".")[0] == "jax" for module in modules)
    if not isinstance(subject, compat.PjitFunction) and not is_own:
        return False
    return not any(callable(leaf) and not isinstance(leaf, type) for leaf in packed.rest)


def hoisted(
    jaxpr: Any, consts: list[Any], always: bool = False, is_open: bool = False
) -> tuple[Any, list[Any]]:
    """Close a jaxpr, or make its constants its leading inputs.

    Args:
        always: whether they become inputs even if all are plain arrays, not tracers or Refs.
        is_open: whether a jaxpr without constants stays open.

    Returns:
        The jaxpr, and the values of its new leading inputs.
    """
    plain = not any(isinstance(const, compat.Tracer) or compat.is_ref(const) for const in consts)
    if plain and not always:
        return compat.with_consts(jaxpr, consts), []
    jaxpr = compat.consts_as_args(jaxpr)
    return (jaxpr if is_open else compat.as_closed(jaxpr)), list(consts)


_LEAF = jax.tree.structure(0)


def check_result(call: OpCall, result: Any, expected: Packed, avals: Sequence[Any]) -> list[Any]:
    """Check a handler's result. Return its arrays.

    Raises:
        TargetError: the result differs from the original's in structure, shapes or dtypes.
    """
    if isinstance(result, jax.Array) and expected.treedef == _LEAF:
        check_value(call, result, avals[0])
        return [result]
    packed = Packed(result, NUMPY + NUMBERS)
    if packed.treedef != expected.treedef:
        raise TargetError(
            f"The result of {call.op_id}'s handler must be {expected.treedef}, as the "
            f"operation's, got {packed.treedef}. Return a result of the same structure."
        )
    leaves = jax.tree.leaves(result)
    values = [leaves[expected.leaf_of(i)] for i in range(len(avals))]
    for value, aval in zip(values, avals, strict=True):
        check_value(call, value, aval)
    return values


def check_value(call: OpCall, value: Any, aval: Any) -> None:
    """Raise TargetError unless ``value`` has the shape and dtype of ``aval``."""
    # The id is read for an error alone: the memo records that a handler's program depends on it.
    if not compat.is_jax_type(value):
        raise TargetError(
            f"The result of {call.op_id}'s handler must be an array of type {aval.str_short()}, "
            f"got {value!r}. Return an array, or NotImplemented to let the operation run."
        )
    given = compat.typeof(value)
    if given != aval and not compat.same_type(given, aval):
        raise TargetError(
            f"The result of {call.op_id}'s handler must be an array of type {aval.str_short()}, "
            f"for which the program was traced, got {given.str_short()}. Convert the result to "
            "that type."
        )
