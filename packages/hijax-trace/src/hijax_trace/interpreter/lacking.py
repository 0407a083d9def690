"""Lacking: programs that must not use some of their inputs, of which nothing is stored.

An array proxy stands for values that are computed from such an input (``Carrier``). The program
that handlers make needs none of its elements, if it computes the values that were planned. If it
computes others, the elements would have to be invented. So the program is staged, and what it uses
is read from the equations that were made, whichever handler or rule of JAX made them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import compat
from ..dataflow.expression import Expression
from ..proxy.carrier import Carrier, NotStoredError, proxy_of
from .frames import Frame
from .lazy import later_of
from .one_pass import Pass
from .op_ids import join_path
from .session import Session
from .tasks import Do, Task


def reinterpret_without(
    session: Session, frame: Frame, jaxpr: Any, values: Sequence[Any], places: Sequence[int]
) -> list[Any]:
    """Re-interpret a program without some of its inputs.

    Raises:
        NotStoredError: the results depend on one of those inputs.
    """
    variables = compat.inputs_of(jaxpr)
    session.lacking = frozenset(
        leaf.path for place in places for leaf in frame.expression(variables[place]).leaves()
    )
    filled = list(values)

    def flat(*tracers: Any) -> list[Any]:
        for place, tracer in zip(places, tracers, strict=True):
            filled[place] = tracer
        return session.reinterpret(frame, jaxpr, filled)

    avals = [values[place].aval for place in places]
    staged, consts = compat.stage(flat, avals, compat.named_info("tap"))
    left, used = compat.without_unused(staged)
    count = len(used) - len(places)
    if any(used[count:]):
        raise _not_stored(session, frame, variables, places, used[count:])
    # Since 0.11 constants are the first arguments; before, they have variables.
    first = [value for value, one in zip(consts, used[:count], strict=True) if one] if count else []
    closed = compat.with_consts(left, [] if count else consts)
    return compat.as_function(closed)(*first)


def restore_derived(run: Pass, eqn: Any) -> None:
    """Let the stored proxy of a derived value make its array, which has no operands to make it."""
    for var in eqn.outvars:
        held = run.frame.proxies.get(var)
        if not isinstance(held, Carrier):
            continue
        own = proxy_of(held)
        if own is not None and any(own is one for one in held.derived.values()):
            run.values.pop(var, None)
            run.values.later[var] = later_of(own, var.aval)


def note_use(session: Session, frame: Frame, task: Task) -> None:
    """Note an operation that takes a value of a lacking input, and returns an activation.

    Whether the program's results depend on it is known when the program has been made.
    """
    eqn = task.eqn
    if compat.holds_jaxprs(eqn) and task.do is not Do.MARKER:
        return  # its own operations are noted
    if any(type(frame.proxies.get(var)) is Carrier for var in eqn.outvars):
        return  # a value that is derived, too
    for atom in eqn.invars:
        held = None if type(atom) is compat.Literal else frame.proxies.get(atom)
        if type(held) is not Carrier or proxy_of(held) is not None:
            continue
        expression = frame.expression(atom)
        if session.lacking.isdisjoint(leaf.path for leaf in expression.leaves()):
            continue
        name = eqn.primitive.name if task.marker is None else task.marker.op_name
        key = (frame.path(task.scopes), frame.label, name)
        number = session.numbers.get(key)
        op_id = join_path(*key) + ("" if number is None else f":{number - 1}")
        session.uses_of_lacking.append((op_id, number is not None, expression))


def _not_stored(
    session: Session,
    frame: Frame,
    variables: Sequence[Any],
    places: Sequence[int],
    used: Sequence[bool],
) -> NotStoredError:
    """Return the error for a program that uses lacking inputs."""
    leaves = [
        leaf
        for place, one in zip(places, used, strict=True)
        if one
        for leaf in frame.expression(variables[place]).leaves()
    ]
    paths = {leaf.path for leaf in leaves}
    noted = [
        one
        for one in session.uses_of_lacking
        if not paths.isdisjoint(leaf.path for leaf in one[2].leaves())
    ]
    # Operations with a handler tell a reader more than the primitives around them.
    noted.sort(key=lambda one: not one[1])
    replaced = sorted(session.replaced)
    if not noted:
        return NotStoredError("The program", sorted(paths), _typed(leaves[0]), replaced)
    op_id, _, met = noted[0]
    own = sorted({leaf.path for leaf in met.leaves()} & paths)
    return NotStoredError(op_id, own, _typed(met), replaced)


def _typed(expression: Expression) -> str:
    aval: Any = expression.aval
    return f"{expression} of shape {tuple(aval.shape)}"
