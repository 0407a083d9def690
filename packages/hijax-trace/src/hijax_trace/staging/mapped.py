"""Mapped: operations that meet the program's own vmap.

JAX at once replaces an operation under ``vmap`` by one on whole batches. A handler is to be asked
about the operation of one example, often only when the program is re-interpreted: where the
operands of a nested function come from is not known before. So the operation becomes the call of a
jaxpr, which JAX maps as any other. The call's name holds the jaxpr from before and the mapped
axes. The interpreter taps that jaxpr's operations and maps the result by ``vmap``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax

from .. import compat
from ..proxy.array_proxy import ArrayProxy
from ..proxy.parts import is_shared
from .marker import hoisted


class Level(NamedTuple):
    """One ``vmap`` around an operation.

    Attributes:
        axis: the name and size of its axis, as JAX has them.
        ins: the mapped axis of each operand; None for operands that are not mapped.
        outs: the same for each result.
    """

    axis: Any
    ins: tuple[int | None, ...]
    outs: tuple[int | None, ...]


@dataclass(eq=False, slots=True)
class Mapped:
    """An operation that was mapped.

    Attributes:
        jaxpr: the closed jaxpr of one example.
        levels: each vmap around it, outermost first.
        whole: the jaxpr that JAX made for the whole batch.
        stack: the name stack of the call.
    """

    jaxpr: Any
    levels: Sequence[Level]
    whole: Any
    stack: Any

    def run(
        self,
        fn: Callable[[list[Any], Mapping[int, ArrayProxy]], list[Any]],
        values: Sequence[Any],
        proxies: Mapping[int, ArrayProxy],
    ) -> list[Any]:
        """Run ``fn`` instead of the jaxpr, mapped.

        Args:
            fn: called once with the operands and array proxies of one example. Returns its results.
            values: the operands of the whole batch.
            proxies: their array proxies, by number.
        """
        return mapped_over(self.levels, fn, list(values), proxies)


def mapped_over(
    levels: Sequence[Level],
    fn: Callable[[list[Any], Mapping[int, ArrayProxy]], list[Any]],
    values: list[Any],
    proxies: Mapping[int, ArrayProxy],
) -> list[Any]:
    """Run a function of one example in maps; see ``Mapped.run``."""
    if not levels:
        return fn(values, proxies)
    level = levels[0]
    leaves, axes, inside = stepped(level, proxies)

    def one(values: list[Any], leaves: list[Any]) -> list[Any]:
        return mapped_over(levels[1:], fn, values, inside(leaves))

    ins = (list(level.ins), axes)
    return compat.mapped(one, level.axis, ins, list(level.outs))(values, leaves)


def stepped(
    level: Level, proxies: Mapping[int, ArrayProxy]
) -> tuple[list[Any], list[int | None], Callable[[list[Any]], dict[int, ArrayProxy]]]:
    """Prepare array proxies for a map.

    Args:
        level: the map.
        proxies: the proxies of the whole batch, by number of the operand.

    Returns:
        The arrays to map, their mapped axes, and a function that makes the proxies of one example
        from its arrays.
    """
    same = {i: held for i, held in proxies.items() if level.ins[i] is None}
    parts = {
        i: held.step(axis, is_mapped=True)
        for i, held in proxies.items()
        if (axis := level.ins[i]) is not None
    }
    leaves, treedef = jax.tree.flatten(parts, is_leaf=is_shared)
    axes = [None if is_shared(leaf) else 0 for leaf in leaves]
    leaves = [leaf.value if is_shared(leaf) else leaf for leaf in leaves]
    return leaves, axes, lambda leaves: {**same, **jax.tree.unflatten(treedef, leaves)}


class MappedName(str):
    """The name of a call. ``mapped`` is None before it is mapped."""

    __slots__ = ("mapped",)
    mapped: Mapped | None


def mapped_in(primitive: Any, params: dict[str, Any]) -> Mapped | None:
    """Return the operation that JAX mapped to an equation, or None."""
    if primitive is not compat.jit_p or type(params["name"]) is not MappedName:
        return None
    mapped = params["name"].mapped
    # One that was differentiated, or mapped once more, keeps the name, but calls another jaxpr.
    return None if mapped is None or mapped.whole is not params["jaxpr"] else mapped


def is_being_mapped(primitive: Any, params: dict[str, Any]) -> bool:
    """Return whether a call is one that JAX maps now."""
    if primitive is not compat.jit_p or type(params["name"]) is not MappedName:
        return False
    return params["name"].mapped is None


def can_map(trace: Any, values: Sequence[Any]) -> bool:
    """Return whether only maps are between a trace and staging."""
    traces = compat.maps_above_staging(trace)
    for one in traces:
        values, axes = _peel(values, one)
        if not all(axis is None or isinstance(axis, int) for axis in axes):
            return False
    return bool(traces)


class Staged(NamedTuple):
    """A call before it is mapped or kept.

    Attributes:
        jaxpr: its closed jaxpr.
        more: the values of the leading inputs that are not arguments.
        results: the packed result, if the function returned more than a flat list.
    """

    jaxpr: Any
    more: list[Any]
    results: Any = None


def staged(name: str, fn: Callable[..., Sequence[Any]], values: Sequence[Any]) -> Staged:
    """Stage a function of flat values.

    Args:
        name: its name.
        fn: the function, which returns a flat list.
        values: the values that it is called with.
    """
    info = compat.named_info(name)
    jaxpr, consts = compat.stage(fn, [compat.typeof(value) for value in values], info)
    return Staged(*hoisted(jaxpr, consts))


def map_call(name: str, call: Staged, values: Sequence[Any]) -> list[Any]:
    """Make a call that JAX maps. Return its results."""
    called, stack = MappedName(name), compat.current_stack()
    called.mapped = None
    ins = [*call.more, *values]
    results = compat.named_call(called, call.jaxpr, ins)
    levels, outs = [], list(results)
    for trace in compat.maps_above_staging(compat.current_trace()):
        ins, in_axes = _peel(ins, trace)
        outs, out_axes = _peel(outs, trace)
        levels.append(Level(compat.axis_of(trace), tuple(in_axes), tuple(out_axes)))
    eqns = [compat.producer(out)[1] for out in outs if compat.is_staged(out)]
    if eqns and eqns[0] is not None and eqns[0].params.get("name") is called:
        # A new name, because a cache of JAX keeps the one that the call was made under.
        params, named = eqns[0].params, MappedName(name)
        named.mapped = Mapped(call.jaxpr, levels[::-1], params["jaxpr"], stack)
        params["name"] = named
    return results


def _peel(values: Sequence[Any], trace: Any) -> tuple[list[Any], list[Any]]:
    """Return the batches of values of a map, and their mapped axes."""
    pairs = [compat.unmapped(value, trace) for value in values]
    return [value for value, _ in pairs], [axis for _, axis in pairs]
