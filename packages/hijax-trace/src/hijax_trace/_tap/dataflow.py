"""Dataflow: the expressions of a jaxpr's values, each made when it is asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from .. import _compat
from .expression import Constant, Expression, Operation, Part, Shard, Unknown
from .forms import CHANGES, CUSTOM_CALLS, SAME, SLICE, Body, Form, form_of

Resolve = Callable[[], Expression]
"""Finds the expression of an input of a jaxpr."""


class Dataflow:
    """The expressions of one jaxpr's values, in one place of a program.

    Args:
        jaxpr: the jaxpr, open.
        inputs: how the expressions of its arguments are found.
        consts: the values of its constants; see ``inputs_of``.
        foreign: the variables whose values are a handler's.
    """

    def __init__(
        self,
        jaxpr: Any,
        inputs: Sequence[Resolve],
        consts: Sequence[Any] = (),
        foreign: Any = frozenset(),
    ):
        self._eqns = jaxpr.eqns
        self._foreign = foreign
        self._inputs = dict(zip(jaxpr.invars, inputs, strict=True))
        self._known: dict[Any, Expression] = {}
        constants = _compat.inputs_of(jaxpr)[: len(consts)]
        for var, value in zip(constants, consts, strict=True):
            self._known[var] = constant(value)
            self._inputs.pop(var, None)
        self._makers = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}

    def expression(self, atom: Any) -> Expression:
        """Returns the expression of a variable or literal of the jaxpr."""
        if isinstance(atom, _compat.Literal):
            return Constant(atom.aval, atom.val)
        if atom not in self._known:
            for eqn in self._needed(atom):
                operands = [self._of(operand) for operand in eqn.invars]
                for i, var in enumerate(eqn.outvars):
                    self._known[var] = self._result(eqn, operands, i)
        return self._of(atom)

    def _of(self, atom: Any) -> Expression:
        if isinstance(atom, _compat.Literal):
            return Constant(atom.aval, atom.val)
        if atom not in self._known:
            resolve = self._inputs.get(atom)
            self._known[atom] = (
                Unknown(atom.aval, "a value of another trace", None)
                if resolve is None
                else resolve()
            )
        return self._known[atom]

    def _needed(self, atom: Any) -> list[Any]:
        """Returns the equations that a value depends on and that are not known yet, in order."""
        # No recursion: programs are thousands of equations deep.
        wanted, found = {atom}, []
        for eqn in reversed(self._eqns[: self._makers.get(atom, -1) + 1]):
            if any(var in wanted and var not in self._known for var in eqn.outvars):
                found.append(eqn)
                wanted.update(x for x in eqn.invars if not isinstance(x, _compat.Literal))
        return found[::-1]

    def _result(self, eqn: Any, operands: list[Expression], result: int) -> Expression:
        aval, form = eqn.outvars[result].aval, form_of(eqn.primitive, eqn.params)
        if eqn.outvars[result] in self._foreign:
            return unknown(aval, "a handler's result", operands)
        if eqn.primitive in CUSTOM_CALLS:
            return _inside(Body(eqn.params["call_jaxpr"], (), ()), operands, result)
        if form is not None:
            found = _through(form, eqn, operands, result)
            if found is not None:
                return found
        if eqn.effects or eqn.primitive is _compat.shard_map_p:
            return unknown(aval, f"a result of {eqn.primitive.name}", operands)
        return Operation(aval, eqn.primitive, eqn.params, operands, result)


def constant(value: Any) -> Expression:
    """Returns the expression of an array that a program closes over."""
    aval = _compat.typeof(value)
    if isinstance(value, _compat.Tracer) or _compat.is_ref(value):
        return Unknown(aval, "a value of an outer trace", 0)
    return Constant(aval, value)


def unknown(aval: Any, why: str, operands: Sequence[Expression]) -> Unknown:
    """Returns the expression of a value that only the running program knows."""
    found: int | None = 0
    for operand in operands:
        found = None if found is None or operand.inputs is None else found | operand.inputs
    return Unknown(aval, why, found)


def _through(form: Form, eqn: Any, operands: list[Expression], result: int) -> Expression | None:
    """Looks into the programs that an equation holds. Returns None where it stays whole."""
    if eqn.primitive is _compat.shard_map_p:
        return None
    bodies = form.bodies(eqn.params, len(operands))
    if any(None in body.inputs for body in bodies):
        return None
    if form.results == "carry":
        # The last body is the one that steps; the while loop's condition returns no carry.
        body = bodies[-1]
        if result >= len(body.carry) or body.kinds[body.carry[result]] != SAME:
            return None
        return operands[body.inputs[body.carry[result]]]  # type: ignore[index]
    found = [
        _inside(body, [operands[i] for i in body.inputs], result)  # type: ignore[index]
        for body in bodies
    ]
    return found[0] if len(found) == 1 or len({x.key for x in found}) == 1 else None


def _inside(body: Body, operands: Sequence[Expression], result: int) -> Expression:
    jaxpr = _compat.open_of(body.jaxpr)
    inputs = [lambda operand=operand: operand for operand in operands]
    flow = Dataflow(jaxpr, inputs, _compat.consts_of(body.jaxpr))
    return flow.expression(jaxpr.outvars[result])


def entering(body: Body, operands: Sequence[Resolve], depth: int) -> list[Resolve]:
    """Returns how the expressions of a body's inputs are found.

    Args:
        body: the body.
        operands: how those of the equation's operands are found.
        depth: how many loops and maps there are around the equation.
    """

    def resolve(i: int) -> Resolve:
        operand, kind = body.inputs[i], body.kinds[i]
        aval = _compat.open_of(body.jaxpr).invars[i].aval

        def find() -> Expression:
            if kind == CHANGES or operand is None:
                # What a loop changes may come from any of its operands.
                return unknown(aval, "a loop's carry", [find() for find in operands])
            whole = operands[operand]()
            if kind == SLICE:
                return Part(aval, whole, 0, depth)
            if getattr(aval, "shape", None) != getattr(whole.aval, "shape", None):
                return Shard(aval, [whole])
            return whole

        return find

    return [resolve(i) for i in range(len(body.inputs))]
