"""Dataflow: expressions of a jaxpr's values, made on demand."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from typing import Any

from .. import compat
from .expression import Expression
from .flow import flow_of
from .holders import CHANGES, SLICE, Body, is_counter, told_by
from .nodes import (
    OTHER_TRACE,
    Carried,
    Carry,
    Choice,
    Constant,
    Counter,
    Device,
    Exchanged,
    Held,
    Operation,
    Part,
    Shard,
    State,
    Unknown,
)
from .sources import (
    COLLECTIVES,
    CONSTANT,
    carry_behind,
    chosen_outside,
    decided_by,
    sources_through,
)

Express = Callable[[int], Expression]
"""Finds how the input of a jaxpr, or the operand of an equation, is computed, from its number."""


class Dataflow:
    """The expressions of one jaxpr's values, in one place of a program.

    Attributes:
        flow: where its values come from, as far as that is the same in all places.
        consts: the values of its constants, by variable.
    """

    def __init__(
        self,
        jaxpr: Any,
        inputs: Express,
        consts: Sequence[Any] = (),
        from_handler: Set[Any] = frozenset(),
    ):
        self._eqns = jaxpr.eqns
        self._from_handler = from_handler
        self._express = inputs
        self.flow = flow_of(jaxpr)
        self._known: dict[Any, Expression] = {}
        self.consts: dict[Any, Any] = {}
        if consts:
            constants = compat.inputs_of(jaxpr)[: len(consts)]
            self.consts = dict(zip(constants, consts, strict=True))
        self._activations: set[Any] = set()
        self._judge: Callable[[str], bool] | None = None

    def expression(self, atom: Any) -> Expression:
        """Return the expression of a variable or literal of the jaxpr."""
        if not isinstance(atom, compat.Literal):
            for eqn in self._needed(atom):
                operands = [self._of(operand) for operand in eqn.invars]
                self._known.update(zip(eqn.outvars, self._results(eqn, operands), strict=True))
        return self._of(atom)

    def forget(self, var: Any) -> None:
        """Forget how a variable is computed, which a handler has replaced since."""
        self._known.pop(var, None)

    def is_activation(self, atom: Any, is_parameter: Callable[[str], bool]) -> bool:
        """Return whether a value is surely an activation, without its expression.

        Most operands are: a handler's result is an activation, and so is a value that is computed
        from one. If this returns False, the expression decides.
        """
        if self._judge is not is_parameter:
            self._judge, self._activations = is_parameter, set()
        seen: set[Any] = set()
        # The nearest first: a residual stream is longer than any way to a handler's result.
        queue = [atom]
        for var in queue:
            if isinstance(var, compat.Literal) or var in seen:
                continue
            if var in self._from_handler or var in self._activations:
                self._activations.add(atom)
                return True
            seen.add(var)
            place = self.flow.makers.get(var)
            if place is None:
                if self._of(var).judged(is_parameter).kind == "activation":
                    self._activations.add(atom)
                    return True
                continue
            eqn = self._eqns[place]
            queue += [eqn.invars[i] for i in decided_by(eqn, eqn.outvars.index(var))]
        return False

    def _of(self, atom: Any) -> Expression:
        if isinstance(atom, compat.Literal):
            return Constant(atom.aval, atom.val)
        found = self._known.get(atom)
        if found is None:
            index = self.flow.inputs.get(atom)
            if atom in self.consts:
                found = constant(self.consts[atom])
            elif index is not None:
                found = self._express(index)
            else:
                found = Unknown(atom.aval, OTHER_TRACE, None)
            self._known[atom] = found
        return found

    def _needed(self, atom: Any) -> list[Any]:
        """Return the equations behind a value that are not known yet."""
        # A stack instead of recursion: programs are thousands of equations deep.
        found: set[int] = set()
        stack = [atom]
        while stack:
            var = stack.pop()
            place = self.flow.makers.get(var)
            if place is not None and place not in found and var not in self._known:
                found.add(place)
                stack += (x for x in self._eqns[place].invars if not isinstance(x, compat.Literal))
        return [self._eqns[place] for place in sorted(found)]

    def _results(self, eqn: Any, operands: list[Expression]) -> list[Expression]:
        # A handler replaced this equation, so its program need not be looked into.
        if self._from_handler and all(var in self._from_handler for var in eqn.outvars):
            return [_from_handler(var.aval, operands) for var in eqn.outvars]
        if eqn.primitive.name == "axis_index":
            return [Device(var.aval) for var in eqn.outvars]
        is_exchanged = eqn.primitive.name in COLLECTIVES or compat.has_only_axes(eqn.effects)
        kind = Exchanged if is_exchanged else Operation
        opaque = f"a result of {eqn.primitive.name}" if eqn.effects and not is_exchanged else None
        inside = _through(eqn, operands)
        return [
            _from_handler(var.aval, operands)
            if var in self._from_handler
            else inside[i]
            if i in inside
            else _opaque(var.aval, opaque, operands)
            if opaque is not None
            else kind(var.aval, eqn.primitive, eqn.params, operands, i)
            for i, var in enumerate(eqn.outvars)
        ]


def constant(value: Any) -> Expression:
    """Return the expression of a value that a program closes over."""
    aval = compat.typeof(value)
    if isinstance(value, compat.Tracer) or compat.is_ref(value):
        return Unknown(aval, "a value of an outer trace", ())
    return Constant(aval, value)


def _from_handler(aval: Any, operands: Sequence[Expression]) -> Unknown:
    return Unknown(aval, "a handler's result", operands, made_of=tuple(operands))


def _opaque(aval: Any, why: str, operands: Sequence[Expression]) -> Unknown:
    """Return the expression of what an operation with an effect returns, as a read of a ref."""
    found = Unknown(aval, why, operands)
    found.operands = tuple(operands)
    return found


def _through(eqn: Any, operands: list[Expression]) -> dict[int, Expression]:
    """Return the expressions of results that an equation's programs tell."""
    told = told_by(eqn)
    if told is None or any(None in body.inputs for body in told[0]):
        return {}
    bodies, results = told
    if results == "carry":
        same = {i: operands[k] for i, k in bodies[0].unchanged().items()}
        return {**_moved_through(eqn, operands), **same}
    if eqn.primitive is compat.shard_map_p:
        return _moved_through(eqn, operands)
    first, *rest = [
        _inside(body.jaxpr, [operands[i] for i in body.inputs])  # type: ignore[index]
        for body in bodies
    ]
    return {
        i: one
        if all(one.key == other[i].key for other in rest)
        else Choice(var.aval, [operands[0], one, *(other[i] for other in rest)])
        for i, (one, var) in enumerate(zip(first, eqn.outvars, strict=True))
    }


def _moved_through(eqn: Any, operands: list[Expression]) -> dict[int, Expression]:
    """Return the expressions of results that a loop or ``shard_map`` only moves."""
    found: dict[int, Expression] = {}
    for i, one in enumerate(sources_through(eqn) or ()):
        if one:
            where = eqn.outvars[i].aval, eqn.primitive, eqn.params, operands, i
            sources = [operands[k] for k in sorted(one - {CONSTANT})]
            found[i] = Held(*where, sources, CONSTANT in one)
    return found


def _inside(jaxpr: Any, operands: Sequence[Expression]) -> list[Expression]:
    """Return the expressions of a body's results."""
    flow = Dataflow(compat.open_of(jaxpr), operands.__getitem__, compat.consts_of(jaxpr))
    return [flow.expression(atom) for atom in compat.open_of(jaxpr).outvars]


def expression_inside(
    body: Body, index: int, operands: Express, count: int, depth: int
) -> Expression:
    """Return how an input of a body is computed."""
    operand, kind = body.inputs[index], body.kinds[index]
    aval = compat.open_of(body.jaxpr).invars[index].aval
    if kind != CHANGES and operand is not None:
        whole = operands(operand)
        if kind == SLICE:
            return Part(aval, whole, 0, depth)
        if getattr(aval, "shape", None) != getattr(whole.aval, "shape", None):
            return Shard(aval, [whole])
        return whole
    chosen = chosen_outside(body, index) if kind == CHANGES else None
    everything = [operands(i) for i in range(count)]
    behind = carry_behind(body, index) if kind == CHANGES else None
    if chosen is not None:
        numbers, is_mixed = chosen
        others = sorted((behind[0] if behind else {*range(count)}) - {*numbers})
        sources = [everything[k] for k in numbers]
        return Carried(aval, sources, [everything[k] for k in others], everything, is_mixed)
    # A changing carry may come from any of the loop's operands.
    if operand is not None and is_counter(body, index):
        return Counter(aval, everything[operand], everything)
    if operand is None or behind is None:
        return Unknown(aval, "a loop's carry", everything)
    known, contracted = behind
    kind_of_carry = State if contracted else Carry
    others = sorted(known - {operand})
    return kind_of_carry(aval, everything[operand], [everything[k] for k in others])
