"""Find: the attentions in a program, by one pass over equations."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Literal

from hijax_trace import (
    Called,
    Constant,
    Expression,
    Group,
    Leaf,
    Operation,
    called,
    found_by,
    holds_programs,
)

from .attention import RESULT, Attention, NotAttention, finish, start
from .softmax import VIEWS, Tracked, follow

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
    """Return the attentions in a jaxpr."""
    dots = sum(_contractions(eqn) for eqn in jaxpr.eqns)
    return _Walk(jaxpr).groups() if dots >= 2 else []


@found_by(find)
def attention(*values: jax.Array, written: Attention, also_used: Sequence[str] = ()) -> jax.Array:
    """Compute an attention that a program spells out.

    Programs do not call it. TraceEngine asks a handler of this function where a program contracts
    two activations, takes the softmax of the result, and contracts that with a third one. The
    scores may be scaled, capped, biased and masked in any order that attention allows. If the
    handler returns a result, none of these operations is run, or shown to other handlers.

    Args:
        values: the values that the operations read.
        written: what they compute.
        also_used: the intermediate values that the program uses elsewhere, in words. If there are
            any, the operations run in any case.
    """
    return written(*values)


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
        if isinstance(atom, Literal):
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
        written, numbers = written.of(result)
        inputs = tuple(self._inputs[number] for number in numbers)
        words = {
            var: _WORDS.get(value.kind, _PART)
            for i in members
            for var in self._jaxpr.eqns[i].outvars
            if isinstance(value := self._env.get(var), Tracked)
        }
        return Group("attention", members, inputs, written, words)

    def _results(self, eqn: Any, operands: Sequence[Value]) -> list[Value]:
        """Return what is known of the results of an equation."""
        nothing: list[Value] = [None] * len(eqn.outvars)
        if any(operand is None for operand in operands):
            return nothing
        body = called(eqn)
        tracked = [operand for operand in operands if isinstance(operand, Tracked)]
        if body is not None and (tracked or _contractions(eqn) == 1):
            return self._inside(body, operands) if _contractions(eqn) < _MANY else nothing
        if eqn.primitive.name == "dot_general":
            return [self._contraction(eqn, operands)]
        if tracked and any(map(_is_symbolic, (*eqn.invars, *eqn.outvars))):
            return nothing
        if not tracked:
            return [_operation(eqn, operands, i) for i in range(len(eqn.outvars))]
        value = follow(eqn, operands)  # type: ignore[arg-type]
        if value is None or len(eqn.outvars) != 1:
            return nothing
        members = frozenset().union(*(one.members for one in tracked), {self._place})
        return [dataclasses.replace(value, members=members)]

    def _inside(self, body: Called, operands: Sequence[Value]) -> list[Value]:
        """Return what is known of the results of a called function."""
        consts = [Constant(jax.typeof(value), value) for value in body.consts]
        env: dict[Any, Value] = dict(zip(body.inputs, [*consts, *operands], strict=True))

        def read(atom: Any) -> Value:
            is_literal = isinstance(atom, Literal)
            return Constant(atom.aval, atom.val) if is_literal else env[atom]

        for eqn in body.jaxpr.eqns:
            results = self._results(eqn, [read(atom) for atom in eqn.invars])
            env.update(zip(eqn.outvars, results, strict=True))
        # The call belongs to the group of what it returns, even if that is an operand.
        results = [read(atom) for atom in body.jaxpr.outvars]
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
        if any(map(_is_symbolic, (*eqn.invars, *eqn.outvars))):
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


_WORDS = {"scores": "its scores", "probs": "its probabilities"}
_PART = "a part of its softmax"


def _is_symbolic(atom: Any) -> bool:
    """Return whether a value has a size that is not a number, as in ``jax.export``."""
    return not all(isinstance(size, int) for size in getattr(atom.aval, "shape", ()))


_KNOWN: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _contractions(eqn: Any) -> int:
    """Return how many contractions an equation holds, at most ``_MANY``."""
    name = eqn.primitive.name
    if name == "dot_general":
        return 1
    if eqn.effects or name in _HOLDING:
        return _MANY
    body = called(eqn)
    if body is None:
        return _MANY if holds_programs(eqn) else 0
    jaxpr = body.jaxpr
    if jaxpr not in _KNOWN:
        _KNOWN[jaxpr] = min(_MANY, sum(map(_contractions, jaxpr.eqns)))
    return _KNOWN[jaxpr]
