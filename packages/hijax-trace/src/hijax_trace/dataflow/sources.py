"""Sources: the values that a jaxpr's results only move, or choose among."""

from __future__ import annotations

from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

from .. import compat
from ..proxy.moves import VIEWS, data_in, rounds
from .expression import numbers_in
from .holders import Body, called_program, told_by

COLLECTIVES = frozenset(
    ("all_gather", "all_gather_invariant", "all_to_all", "pbroadcast", "ppermute")
)
"""Primitives that move elements between devices. No array proxy follows them."""

CONSTANT = -1
"""The source of elements that are constants of a jaxpr."""

Sources = frozenset[int]
"""The numbers of the inputs whose elements a value has, and perhaps ``CONSTANT``."""


@compat.once_per_jaxpr
def sources_of(jaxpr: Any) -> tuple[Sources | None, ...]:
    """Return for each result of a jaxpr the inputs whose elements it has.

    None for a result with an element that the jaxpr computes. Indices, masks and predicates are no
    sources: they choose elements.
    """
    known: dict[Any, Sources | None] = {var: frozenset([i]) for i, var in enumerate(jaxpr.invars)}
    for var in compat.inputs_of(jaxpr):
        known.setdefault(var, frozenset([CONSTANT]))
    for eqn in jaxpr.eqns:
        # Most equations compute something.
        if (results := sources_through(eqn, known)) is not None:
            known.update(zip(eqn.outvars, results, strict=True))
    return tuple(_known(atom, known) for atom in jaxpr.outvars)


def _known(atom: Any, known: Mapping[Any, Sources | None]) -> Sources | None:
    return frozenset([CONSTANT]) if isinstance(atom, compat.Literal) else known.get(atom)


def sources_through(
    eqn: Any, known: Mapping[Any, Sources | None] | None = None
) -> Sequence[Sources | None] | None:
    """Return the sources of an equation's results; None if it computes all of them.

    Args:
        known: the sources of its operands; by default each operand is one, by its number.
    """

    def own(i: int) -> Sources | None:
        return _own(i) if known is None else _known(eqn.invars[i], known)

    name = eqn.primitive.name
    if rounds(name, eqn.params):
        return None
    if name in VIEWS or name in COLLECTIVES:
        return [_joined(own, data_in(name, len(eqn.invars), i)) for i in range(len(eqn.outvars))]
    columns = _by_program(eqn, own)
    return list(map(_united, zip(*columns, strict=True))) if columns else None


def _by_program(eqn: Any, own: Callable[[int], Sources | None]) -> list[list[Sources | None]]:
    """Return the sources of an equation's results as each of its programs has them.

    There are none if its programs do not tell its results. Of a loop, the step tells all of them.
    """
    told = told_by(eqn)
    if told is None:
        return []
    bodies, results = told
    if results != "carry":
        return [_outside(body, sources_of(body.jaxpr), own) for body in bodies]
    (body,) = bodies
    carried = carried_sources(body)
    inside = [
        carried[body.carry[i]] if i < len(body.carry) else _through_carry(one, carried)
        for i, one in enumerate(sources_of(body.jaxpr))
    ]
    return [_outside(body, inside, own)]


@compat.once_per_jaxpr
def _carried_in(jaxpr: Any) -> dict[range, dict[int, Sources | None]]:
    """Return where ``carried_sources`` of a body are kept."""
    return {}


def carried_sources(body: Body) -> Mapping[int, Sources | None]:
    """Return the sources of what a loop carries, in any step: inputs of its body.

    Args:
        body: the body of the loop, which returns what it carries first.

    Returns:
        By number of the carried input; None if a step computes it.
    """
    known = _carried_in(body.jaxpr)
    if body.carry not in known:
        results = sources_of(body.jaxpr)
        found: dict[int, Sources | None] = {k: frozenset([k]) for k in body.carry}
        after: dict[int, Sources | None] = {}
        # A step may pass one carry to another: go on until no step adds a source.
        while after != found:
            found = after or found
            after = {
                k: _united((found[k], _through_carry(results[i], found)))
                for i, k in enumerate(body.carry)
            }
        known[body.carry] = found
    return known[body.carry]


def _through_carry(one: Sources | None, carried: Mapping[int, Sources | None]) -> Sources | None:
    if one is None:
        return None
    return _united([carried.get(i, frozenset([i])) for i in one])


def _outside(
    body: Body, inside: Sequence[Sources | None], own: Callable[[int], Sources | None]
) -> list[Sources | None]:
    """Return the sources of an equation's results, from those of its body's results."""

    def one(i: int) -> Sources | None:
        if i == CONSTANT:
            return frozenset([CONSTANT])
        operand = body.inputs[i]
        return None if operand is None else own(operand)

    return [None if found is None else _joined(one, found) for found in inside]


def _joined(
    of: Callable[[int], Sources | None], numbers: Sequence[int] | Sources
) -> Sources | None:
    return _united([of(i) for i in numbers])


def _united(parts: Sequence[Sources | None]) -> Sources | None:
    if any(part is None for part in parts):
        return None
    return frozenset[int]().union(*parts)  # type: ignore[arg-type]


def chosen_outside(body: Body, index: int) -> tuple[list[int], bool] | None:
    """Return the operands of a loop that a carried input of its body is a choice of.

    Returns:
        The numbers of the operands, and whether it may be a constant of the body, too. None if a
        step computes it.
    """
    body, index = body.stepped(index)
    found = carried_sources(body).get(index)
    if found is None:
        return None
    operands = [body.inputs[i] for i in sorted(found - {CONSTANT})]
    return None if None in operands else (operands, CONSTANT in found)  # type: ignore[return-value]


CONTRACTIONS = frozenset(("conv_general_dilated", "dot_general", "ragged_dot_general"))
"""Primitives whose results are activations, whatever their operands are."""


def contracts(primitive: Any, params: Mapping[str, Any]) -> bool:
    """Return whether an operation is a contraction, or may hold one."""
    if primitive.name in CONTRACTIONS or primitive in (
        compat.call_hi_primitive_p,
        compat.deferred_p,
    ):
        return True
    values = params.values()
    parts = (part for x in values for part in (x if isinstance(x, tuple) else (x,)))
    return any(_contracts(part) for part in parts if isinstance(part, compat.JAXPRS))


@compat.once_per_jaxpr
def _contracts(jaxpr: Any) -> bool:
    return any(contracts(eqn.primitive, eqn.params) for eqn in jaxpr.eqns)


class Behind(NamedTuple):
    """What a value may depend on.

    Attributes:
        inputs: the inputs, as the bits of an integer.
        contracted: whether it may come out of a contraction of them.
        deciding: those of the inputs that make it an activation if they are one, as bits. Some may
            be missing.
    """

    inputs: int = 0
    contracted: bool = False
    deciding: int = 0


@compat.once_per_jaxpr
def inputs_behind(jaxpr: Any) -> tuple[Behind, ...]:
    """Return for each result of a jaxpr the inputs that it may depend on."""
    nothing = Behind()
    known = {var: Behind(1 << i, False, 1 << i) for i, var in enumerate(jaxpr.invars)}

    def behind(atoms: Sequence[Any]) -> list[Behind]:
        return [nothing if isinstance(x, compat.Literal) else known.get(x, nothing) for x in atoms]

    for eqn in jaxpr.eqns:
        operands, inputs, contracted = behind(eqn.invars), 0, contracts(eqn.primitive, eqn.params)
        for one in operands:
            inputs, contracted = inputs | one.inputs, contracted or one.contracted
        for result, var in enumerate(eqn.outvars):
            deciding = 0
            for i in decided_by(eqn, result):
                deciding |= operands[i].deciding
            known[var] = Behind(inputs, contracted, deciding)
    return tuple(behind(jaxpr.outvars))


def decided_by(eqn: Any, result: int) -> Sequence[int]:
    """Return the operands that make a result an activation if they are one. Some may be missing."""
    # A view of a parameter stays a view if its index is an activation.
    if eqn.effects or (eqn.primitive.name in VIEWS and len(eqn.invars) > 1):
        return ()
    called = called_program(eqn)
    if called is None:
        return () if compat.holds_jaxprs(eqn) else range(len(eqn.invars))
    if len(compat.open_of(called).invars) != len(eqn.invars):
        return ()  # its rule alone takes the others
    return numbers_in(inputs_behind(called)[result].deciding)


def carry_behind(body: Body, index: int) -> tuple[frozenset[int], bool] | None:
    """Return the operands of a loop that a carried input of its body may depend on, in any step.

    Returns:
        Their numbers, and whether it may come out of a contraction of them. None if they are not
        all operands of the loop.
    """
    body, index = body.stepped(index)
    results = inputs_behind(body.jaxpr)
    found, contracted, left = 1 << index, False, [index]
    while left:
        one = left.pop()
        if one in body.carry:
            behind = results[one - body.carry.start]
            left += numbers_in(behind.inputs & ~found)
            found, contracted = found | behind.inputs, contracted or behind.contracted
    operands = [body.inputs[i] for i in numbers_in(found)]
    known = frozenset(i for i in operands if i is not None)
    return None if None in operands else (known, contracted)


def returned_views(eqn: Any, held: Sequence[bool]) -> list[int]:
    """Return which results of a call, branch or loop may be views of operands.

    Returns:
        The numbers of the results.
    """
    if not compat.holds_jaxprs(eqn):
        return []
    found = {
        i
        for column in _by_program(eqn, _own)
        for i, one in enumerate(column)
        if one and any(k >= 0 and held[k] for k in one)
    }
    return sorted(found)


def views_in_all(bodies: Sequence[Body], held: Container[int]) -> list[int]:
    """Return which results are views of some of the operands in all branches, by number."""
    columns = [_outside(body, sources_of(body.jaxpr), _own) for body in bodies]
    united = enumerate(map(_united, zip(*columns, strict=True)))
    return [i for i, one in united if one and all(k in held for k in one)]


def _own(operand: int) -> Sources:
    return frozenset([operand])
