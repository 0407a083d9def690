"""Restage: runs a jaxpr again, with other objects instead of some arrays."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .. import compat
from ..proxy.array_proxy import ArrayProxy, is_proxy
from ..staging.deferred import Program, staged


class Restaged(NamedTuple):
    """A program that was staged again.

    Attributes:
        jaxpr: the open jaxpr, with the inputs of the original.
        starts: for each equation of the original, how many equations are before its replacement.
        results: builds the original's results from its own.
    """

    jaxpr: Any
    consts: list[Any]
    starts: list[int]
    results: Callable[[Sequence[Any]], list[Any]]


class Restaging:
    """Runs jaxprs on values, some of which stand for arrays.

    Attributes:
        starts: for each equation, how many equations had been staged before it.
    """

    def __init__(self, by_position: bool = False):
        self.starts: list[int] = []
        self._by_position = by_position

    def results(self, eqn: Any, operands: list[Any], info: Any) -> Sequence[Any] | None:
        """Return an equation's results; None to make it again with arrays."""
        raise NotImplementedError

    def array(self, value: Any, aval: Any) -> Any:
        """Return the array of that type that a value is or stands for."""
        raise NotImplementedError

    def run(self, jaxpr: Any, values: Sequence[Any], caller: Any = None) -> list[Any]:
        """Return the results of an open jaxpr; some may stand for arrays.

        Args:
            caller: the source of the call that it is inlined for, or None.
        """
        trace, by_position = compat.current_trace(), self._by_position
        self._by_position = False
        outer = compat.current_stack() if caller is None else caller.name_stack
        env = dict(zip(compat.inputs_of(jaxpr), values, strict=True))
        arrays: dict[Any, Any] = {}

        def read(atom: Any) -> Any:
            return atom.val if type(atom) is compat.Literal else env[atom]

        def array_of(atom: Any) -> Any:
            if type(atom) is compat.Literal:
                return atom.val
            if atom not in arrays:
                arrays[atom] = self.array(env[atom], atom.aval)
            return arrays[atom]

        for eqn in jaxpr.eqns:
            if by_position:
                self.starts.append(compat.staged_count(trace))
            operands = list(map(read, eqn.invars))
            stack = eqn.source_info.name_stack
            if len(outer):
                stack = outer + stack if len(stack) else outer
            info = compat.info_of(eqn, caller, stack)
            with compat.at(info), eqn.ctx.manager:
                results = self.results(eqn, operands, info)
                if results is None:
                    operands = list(map(array_of, eqn.invars))
            if results is None:
                results = _again(trace, eqn, operands, info)
            env.update(zip(eqn.outvars, results, strict=True))
        return list(map(read, jaxpr.outvars))


def _again(trace: Any, eqn: Any, values: Sequence[Any], info: Any) -> Sequence[Any]:
    """Make an equation as it is."""
    pairs = zip(values, eqn.invars, strict=True)
    is_same = all(
        type(atom) is compat.Literal or compat.typeof(value) == atom.aval for value, atom in pairs
    )
    if is_same and compat.can_append(eqn):
        return compat.append(trace, eqn, values, info)
    return compat.rebind(eqn, values, info)


class Restoring(Program):
    """The program that restores the array of a proxy."""

    def __init__(self, jaxpr: Any, treedef: Any):
        super().__init__(jaxpr)
        self._treedef = treedef

    def proxy(self, values: Any) -> ArrayProxy:
        """Return the proxy of its arrays."""
        return jax.tree.unflatten(self._treedef, values)


def as_array(value: Any, aval: Any) -> Any:
    """Return a value; for a proxy, stage the restoring of its array.

    Args:
        value: a value, or a proxy of tracers of the trace that is being staged.
    """
    if not is_proxy(value):
        return value
    leaves, treedef = jax.tree.flatten(value)

    def restored(*leaves: Any) -> list[Any]:
        return [jax.tree.unflatten(treedef, leaves).restore().astype(aval.dtype)]

    call = staged("restored", restored, leaves)
    (array,) = compat.deferred_p.bind(*leaves, function=Restoring(call.jaxpr, treedef))
    return array


def is_restoring(primitive: Any, params: dict[str, Any]) -> bool:
    """Return whether an equation restores the array of a proxy."""
    return primitive is compat.deferred_p and type(params["function"]) is Restoring
