"""Find: the attentions in a program, by one pass over equations."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from .. import compat
from ..dataflow.expression import Expression, Leaf
from ..dataflow.holders import custom_body, holder_of
from ..dataflow.nodes import Constant, Operation
from .attention import RESULT, Attention, attention
from .group import Group, uses
from .read import NotAttention, finish, start
from .softmax import Tracked, follow
from .values import VIEWS

_MANY = 2
"""More contractions than an equation of a pattern may hold."""
_HOLDING = (
    "conv_general_dilated",
    "ragged_dot_general",
    "pallas_call",
    "mpmd_map",
    "call_hi_primitive",
)

Value = Tracked | Expression | None
"""What is known of a value; None if it was computed from scores in another way."""


def find(jaxpr: Any) -> list[Group]:
    """Return the attentions in an open jaxpr."""
    dots = sum(contractions(eqn) for eqn in jaxpr.eqns)
    return _Walk(jaxpr).groups() if dots >= 2 else []


FINDERS: Mapping[Any, Callable[[Any], Sequence[Group]]] = {attention: find}
"""By target: what finds the groups of equations that spell out the function in a jaxpr."""


class _Walk:
    """A pass over a jaxpr, and over the functions that it calls."""

    def __init__(self, jaxpr: Any):
        self._jaxpr = jaxpr
        self._inputs: list[Any] = []
        self._env: dict[Any, Value] = {}
        self._place = 0
        self._found: tuple[Attention, Tracked] | None = None

    def groups(self) -> list[Group]:
        """Return the attentions."""
        groups = []
        for place, eqn in enumerate(self._jaxpr.eqns):
            self._place, self._found = place, None
            results = self._results(eqn, [self._read(atom) for atom in eqn.invars])
            group = self._group(eqn, results)
            if group is not None:
                groups.append(group)
            for var, value in zip(eqn.outvars, results, strict=True):
                if isinstance(value, Tracked) or (self._found is None and _is_cheap(eqn, value)):
                    self._env[var] = value
        return groups

    def _read(self, atom: Any) -> Value:
        if isinstance(atom, compat.Literal):
            return Constant(atom.aval, atom.val)
        if atom not in self._env:
            number = len(self._inputs)
            self._inputs.append(atom)
            self._env[atom] = Leaf(atom.aval, number, str(number))
        return self._env[atom]

    def _group(self, eqn: Any, results: Sequence[Value]) -> Group | None:
        if self._found is None:
            return None
        written, probs = self._found
        (result, *others) = results
        if others or not isinstance(result, Expression) or not _has_result(result):
            return None
        members = tuple(sorted(probs.members | {self._place}))
        if any(self._jaxpr.eqns[i].effects for i in members):
            return None
        written, numbers = written.of(result)
        used, unused = uses(self._jaxpr, members)
        also = [_name(self._env.get(var), self._jaxpr.eqns[i]) for var, i in used.items()]
        inputs = tuple(self._inputs[number] for number in numbers)
        also_used = tuple(dict.fromkeys(also))
        return Group("attention", members, inputs, written, also_used, tuple(unused))

    def _results(self, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        """Return what is known of the results of an equation."""
        nothing: list[Value] = [None] * len(eqn.outvars)
        if any(operand is None for operand in operands):
            return nothing
        body = _called(eqn)
        tracked = [operand for operand in operands if isinstance(operand, Tracked)]
        if body is not None and (tracked or contractions(eqn) == 1):
            return self._inside(body, operands) if contractions(eqn) < _MANY else nothing
        if eqn.primitive.name == "dot_general":
            return [self._contraction(eqn, operands)]
        if tracked and any(compat.is_symbolic(x.aval) for x in (*eqn.invars, *eqn.outvars)):
            return nothing
        if not tracked:
            return [_operation(eqn, operands, i) for i in range(len(eqn.outvars))]
        value = follow(eqn, operands)  # type: ignore[arg-type]
        if value is None or len(eqn.outvars) != 1:
            return nothing
        members = frozenset().union(*(one.members for one in tracked), {self._place})
        return [dataclasses.replace(value, members=members)]

    def _inside(self, body: Any, operands: Sequence[Value]) -> list[Value]:
        """Return what is known of the results of a called function."""
        jaxpr = compat.open_of(body)
        consts = [Constant(compat.typeof(value), value) for value in compat.consts_of(body)]
        env: dict[Any, Value] = dict(
            zip(compat.inputs_of(jaxpr), [*consts, *operands], strict=True)
        )

        def read(atom: Any) -> Value:
            is_literal = isinstance(atom, compat.Literal)
            return Constant(atom.aval, atom.val) if is_literal else env[atom]

        for eqn in jaxpr.eqns:
            results = self._results(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        # The call belongs to the group of what it returns, even if that is an operand.
        results = [read(atom) for atom in jaxpr.outvars]
        return [
            dataclasses.replace(one, members=one.members | {self._place})
            if isinstance(one, Tracked)
            else one
            for one in results
        ]

    def _contraction(self, eqn: Any, operands: Sequence[Value]) -> Value:
        (aval,), dims = (var.aval for var in eqn.outvars), eqn.params["dimension_numbers"]
        if not all(jnp.issubdtype(x.aval.dtype, jnp.floating) for x in eqn.invars):
            return None
        # Labels are told apart by their sizes, and symbolic ones can't be compared.
        if any(compat.is_symbolic(x.aval) for x in (*eqn.invars, *eqn.outvars)):
            return None
        tracked = [side for side in (0, 1) if isinstance(operands[side], Tracked)]
        if not tracked:
            logits, axes = start((operands[0], operands[1]), dims)  # type: ignore[arg-type]
            return Tracked("scores", logits, axes, frozenset({self._place}))
        (side, *others) = tracked
        probs, values = operands[side], operands[1 - side]
        if others or not isinstance(probs, Tracked) or probs.kind != "probs":
            return None
        result = Leaf(aval, len(self._inputs), RESULT)
        try:
            found = finish(probs, values, dims, side, aval, result)  # type: ignore[arg-type]
        except NotAttention:
            return None
        self._found = found, probs
        return result


def _operation(eqn: Any, operands: Sequence[Any], result: int) -> Operation:
    found = Operation(eqn.outvars[result].aval, eqn.primitive, eqn.params, operands, result)
    found.is_constant |= eqn.primitive.name == "iota"
    return found


def _is_cheap(eqn: Any, value: Value) -> bool:
    """Return whether a pattern may compute a value again."""
    if not isinstance(value, Expression):
        return False
    return eqn.primitive.name in VIEWS or (value.is_constant and not eqn.effects)


def _has_result(value: Expression) -> bool:
    return any(leaf.path == RESULT for leaf in value.leaves())


def _called(eqn: Any) -> Any:
    """Return the program of a function's call; None for other equations."""
    if eqn.primitive is compat.jit_p:
        return eqn.params["jaxpr"]
    if eqn.primitive is compat.deferred_p:
        function = eqn.params["function"]
        # A derivative shares what is made of its program, which then can't be part of another.
        return None if function.program.is_differentiated else function.jaxpr
    body = custom_body(eqn.primitive, eqn.params, len(eqn.invars))
    return None if body is None else body.jaxpr


def _name(value: Value, eqn: Any) -> str:
    """Describe an intermediate value in words."""
    if isinstance(value, Tracked):
        return {"scores": "its scores", "probs": "its probabilities"}.get(
            value.kind, "a part of its softmax"
        )
    return f"a result of {eqn.primitive.name}"


_KNOWN: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def contractions(eqn: Any) -> int:
    """Return how many contractions an equation holds, at most ``_MANY``."""
    name = eqn.primitive.name
    if name == "dot_general":
        return 1
    if eqn.effects or name in _HOLDING:
        return _MANY
    body = _called(eqn)
    if body is None:
        holds = compat.holds_jaxprs(eqn) and holder_of(eqn.primitive, eqn.params) is not None
        return _MANY if holds else 0
    jaxpr = compat.open_of(body)
    if jaxpr not in _KNOWN:
        _KNOWN[jaxpr] = min(_MANY, sum(map(contractions, jaxpr.eqns)))
    return _KNOWN[jaxpr]
