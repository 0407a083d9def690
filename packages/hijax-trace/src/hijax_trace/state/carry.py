"""Carry: stages a program again so that it carries array proxies."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from .. import compat
from ..dataflow.follow import PLACES, follow, placed
from ..dataflow.holders import told_by
from ..proxy.array_proxy import ArrayProxy, Lost, form_of, is_proxy
from ..proxy.move import MoveError
from ..proxy.moves import MOVES, SAME_ELEMENTS
from ..proxy.updates import UPDATES, read_by
from ..staging.deferred import Function, defer, staged
from ..staging.marker import marker_of
from . import loops
from .restage import Restaged, Restaging, as_array


def carry(jaxpr: Any, consts: Sequence[Any], given: Mapping[int, tuple[Any, int]]) -> Restaged:
    """Stage a program again so that it carries array proxies.

    Args:
        given: by number, the arguments that are proxies: the proxy's structure, and the number of
            the argument that is its first array.
    """
    carrying = Carrying(by_position=True)
    treedef: Any = None

    def flat(*args: Any) -> list[Any]:
        nonlocal treedef
        values = list(args)
        for i, (structure, first) in given.items():
            leaves = args[first : first + structure.num_leaves]
            values[i] = jax.tree.unflatten(structure, leaves)
        # A part or another arrangement of a carried proxy is returned as an array.
        forms = {form_of(values[i]) for i in given}
        results = carrying.run(jaxpr, [*consts, *values])
        for i, (value, var) in enumerate(zip(results, jaxpr.outvars, strict=True)):
            if is_proxy(value) and form_of(value) not in forms:
                results[i] = as_array(value, var.aval)
        leaves, treedef = jax.tree.flatten(results)
        return leaves

    avals = [var.aval for var in compat.inputs_of(jaxpr)[len(consts) :]]
    new, more = compat.stage(flat, avals, jaxpr.debug_info)
    return Restaged(new, more, carrying.starts, lambda out: jax.tree.unflatten(treedef, out))


class Carrying(Restaging):
    """Runs jaxprs on values, some of which are array proxies."""

    def array(self, value: Any, aval: Any) -> Any:
        """Return a value, or the array that a proxy stands for."""
        return as_array(value, aval)

    def results(self, eqn: Any, operands: list[Any], info: Any) -> Sequence[Any] | None:
        """Return an equation's results on proxies; None if it needs arrays."""
        if not any(map(is_proxy, operands)):
            return None
        name = eqn.primitive.name
        if name in PLACES:
            return [placed(eqn.params, PLACES[name], operands[0], eqn.primitive.bind)]
        if name in SAME_ELEMENTS:
            return operands[: len(eqn.outvars)]
        if name in UPDATES or name in MOVES:
            return _moved(eqn, operands)
        if marker_of(eqn) is not None:
            return None
        if eqn.primitive is compat.deferred_p:
            function = eqn.params["function"]
            # A derivative shares what is made of its program, and takes arrays.
            if not (function.is_derived or function.program.is_differentiated):
                return self._mapped(function, operands)
        loop = loops.RULES.get(eqn.primitive)
        if loop is not None:
            return loop(self.run, eqn, operands)
        closed = _called(eqn)
        if closed is None:
            for operand in filter(is_proxy, operands if compat.holds_jaxprs(eqn) else ()):
                operand.on_dropped(f"{name} takes the array")
            return None
        jaxpr = compat.open_of(closed)

        def call(operands: Sequence[Any]) -> list[Any]:
            return self.run(jaxpr, [*compat.consts_of(closed), *operands], info)

        if eqn.primitive is not compat.jit_p and not any(
            map(is_proxy, loops.types_of(call, operands))
        ):
            return None  # no result is a proxy: keep the call with its derivative rules
        return call(operands)

    def _mapped(self, function: Function, operands: list[Any]) -> list[Any] | None:
        """Run the operation that JAX mapped on proxies, and map the result."""
        levels = function.levels

        def one(operands: Sequence[Any]) -> list[Any]:
            leaves, treedef = jax.tree.flatten(list(operands))
            results: Any = None

            def flat(*leaves: Any) -> list[Any]:
                nonlocal results
                closed, values = function.program.jaxpr, jax.tree.unflatten(treedef, leaves)
                found = self.run(compat.open_of(closed), [*compat.consts_of(closed), *values])
                found, results = jax.tree.flatten(found)
                return found

            call = staged("mapped", flat, leaves)
            return jax.tree.unflatten(results, defer(call, leaves))

        def level(i: int, operands: Sequence[Any]) -> list[Any]:
            if i == len(levels):
                return one(operands)
            axes, outs = list(levels[i].ins), list(levels[i].outs)
            inner = compat.mapped(
                lambda operands: level(i + 1, operands), levels[i].axis, (axes,), outs
            )
            return inner(operands)

        for place, operand in enumerate(operands):
            axes = [one.ins[place] for one in levels]
            if is_proxy(operand) and (why := _why_not_along(operand, axes)):
                operand.on_dropped(why)
                return None
        return level(0, operands)


def _why_not_along(proxy: ArrayProxy, axes: Sequence[int | None]) -> str | None:
    """Return why a proxy can't be mapped along axes, or None."""
    for axis in axes:
        if axis is not None:
            proxy = proxy.step(axis, is_mapped=True)
            if isinstance(proxy, Lost):
                return proxy.why
    return None


def _moved(eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    """Return the results of a move or update; None for arrays."""
    name = eqn.primitive.name
    if name in UPDATES:
        proxies = [one for i in read_by(name, len(operands)) if is_proxy(one := operands[i])]
        try:
            return proxies[0].updated(name, eqn.params, operands) if proxies else None
        except MoveError as error:
            proxies[0].on_dropped(str(error))
            return None
    held = [operand if is_proxy(operand) else None for operand in operands]
    avals = [var.aval for var in eqn.outvars]
    found = follow(name, eqn.params, operands, held, avals)
    proxy = next((one for one in found if one is not None), None)
    if isinstance(proxy, Lost):
        next(one for one in held if one is not None).on_dropped(proxy.why)
        return None
    return found if proxy is not None else None


def _called(eqn: Any) -> Any:
    """Return the program of a function's call; None for other equations."""
    told = told_by(eqn)
    if told is None or eqn.primitive is compat.deferred_p:
        return None
    body, *others = told[0]
    is_call = not others and body.inputs == tuple(range(len(eqn.invars)))
    return body.jaxpr if is_call else None
