"""Loops and branches at export: LiteRT has no quantized loop of rolled layers, so that they are
written out; and its IF computes something else than was converted, so that all branches of a cond
are computed, and one result is taken."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from provider_odml import OdmlError
from provider_odml.features import (
    Interpreter,
    Op,
    bind_again,
    equations_in,
    is_float,
    name_of,
    parts_of_scan,
    program_of,
)

from .._compat import place_of
from ..forms import wall
from .staged import Operation, operation_p


class At(NamedTuple):
    """Where in the loops and branches that are written out.

    Attributes:
        steps: the number of the step in each loop, the outermost first.
        is_chosen: whether it is in a branch that an input chooses.
    """

    steps: tuple[int, ...] = ()
    is_chosen: bool = False


OUTSIDE = At()


class StepCall:
    """An operation in a step of loops, as a handler sees it.

    Attributes:
        operation: the operation.
        at: where it is.
        op_id: its id, with the numbers of its step.
        proceed: computes it from its arguments.
    """

    def __init__(self, operation: Operation, at: At):
        self.operation = operation
        self.at = at
        self.op_id = operation.place.at(at.steps)
        self.proceed = operation.proceed


class Handler(Protocol):
    """What is done at each operation, and where values of steps or branches are joined."""

    def __call__(self, op: Op, call: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the results of an operation, or ``NotImplemented`` for what it computes."""
        ...

    def joined(self, join: Callable[..., jax.Array], *values: jax.Array) -> jax.Array:
        """Return ``join(*values)``."""
        ...


class Plain:
    """Computes what the program does."""

    def __call__(self, op: Op, call: StepCall, *args: Any, **kwargs: Any) -> Any:
        """Let the operation run."""
        return NotImplemented

    def joined(self, join: Callable[..., jax.Array], *values: jax.Array) -> jax.Array:
        """Join values."""
        return join(*values)


def written_out(jaxpr: Any, handler: Handler, arrays: Sequence[Any], at: At = OUTSIDE) -> list[Any]:
    """Return the results of a staged program, its scans, fixed loops and branches written out.

    Step i of ``scan(body)`` is under the name scope ``scan(body)[i]``. A branch that is known to be
    taken is the only one; of others, all are computed.

    Args:
        jaxpr: the program.
        handler: what is done at each operation.
        arrays: its arguments.
        at: where the program is.
    """
    return _WritingOut(handler, at).run(jaxpr, arrays)


class _WritingOut(Interpreter):
    def __init__(self, handler: Handler, at: At):
        self.handler = handler
        self.at = at

    def equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        with place_of(eqn):
            if eqn.primitive is operation_p:
                return _operation(
                    self.handler, StepCall(eqn.params["operation"], self.at), operands
                )
            rule = RULES.get(eqn.primitive.name)
            if rule is not None:
                return rule(self.handler, self.at, eqn, operands)
            if program_of(eqn) is not None or eqn.primitive.name in _STAY:
                return super().equation(eqn, operands)
            _check_holds_none(eqn)
            if not eqn.effects and _is_number(eqn, operands):
                # Which branch a known number takes is known.
                with jax.ensure_compile_time_eval():
                    return bind_again(eqn, operands)
            return bind_again(eqn, operands)


def _check_holds_none(eqn: Any) -> None:
    """Refuse an operation in what this knows no rule for."""
    inside = [one for one in equations_in(*eqn.params.values()) if one.primitive is operation_p]
    if inside:
        place = inside[0].params["operation"].place
        raise OdmlError(
            f"Export must know the function that holds an operation, got {place.at(())} in a "
            f"{eqn.primitive.name}. Export a form of the program without it."
        )


def _is_number(eqn: Any, operands: Sequence[Any]) -> bool:
    """Return whether an equation computes integers from known ones."""
    if any(isinstance(operand, jax.core.Tracer) for operand in operands):
        return False
    kinds = (jnp.integer, jnp.bool_)
    return all(
        var.aval.size == 1 and any(jnp.issubdtype(var.aval.dtype, kind) for kind in kinds)
        for var in (*eqn.invars, *eqn.outvars)
    )


def _operation(handler: Handler, call: StepCall, operands: Sequence[Any]) -> list[Any]:
    args, kwargs = call.operation.arguments(operands)
    found = handler(call.operation.op, call, *args, **kwargs)
    return jax.tree.leaves(call.proceed(*args, **kwargs) if found is NotImplemented else found)


def _scan(handler: Handler, at: At, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    params, (consts, carried) = eqn.params, parts_of_scan(eqn)
    body, count = params["jaxpr"], params["length"]
    fixed, carry, xs = (
        list(operands[:consts]),
        list(operands[consts : consts + carried]),
        operands[consts + carried :],
    )
    found = []
    for i in reversed(range(count)) if params["reverse"] else range(count):
        step = at._replace(steps=(*at.steps, i))
        with jax.named_scope(f"scan({name_of(body)})[{i}]".replace("/", ".")):
            rows = [_row(x, i) for x in xs]
            out = written_out(body, handler, [*fixed, *carry, *rows], step)
        carry = out[:carried]
        found.append(out[carried:])
    if params["reverse"]:
        found.reverse()
    if not count:
        ys = [jnp.zeros(var.aval.shape, var.aval.dtype) for var in eqn.outvars[carried:]]
    else:
        ys = [
            _joined(handler, lambda *rows: jnp.stack(rows), rows)
            for rows in zip(*found, strict=True)
        ]
    return [*carry, *ys]


def _row(x: jax.Array, i: int) -> jax.Array:
    # The converter would give all rows, and what else reads the array, the scale of one of them.
    return lax.index_in_dim(wall(x) if is_float(x) else x, i, keepdims=False)


def _joined(handler: Handler, join: Callable[..., jax.Array], values: Sequence[Any]) -> jax.Array:
    # Integers don't have a range.
    return handler.joined(join, *values) if is_float(values[-1]) else join(*values)


def _cond(handler: Handler, at: At, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    index, *rest = operands
    branches = eqn.params["branches"]
    if not isinstance(index, jax.core.Tracer):
        known = int(np.clip(np.asarray(index), 0, len(branches) - 1))
        return written_out(branches[known], handler, rest, at)
    found = []
    for branch in branches:
        with jax.named_scope(f"cond({name_of(branch)})".replace("/", ".")):
            found.append(written_out(branch, handler, rest, at._replace(is_chosen=True)))
    return [_joined(handler, _one_of, (index, *results)) for results in zip(*found, strict=True)]


def _one_of(index: Any, *results: Any) -> jax.Array:
    """Return the taken branch's result, where all branches are computed."""
    found = results[0]
    for i, one in enumerate(results[1:], 1):
        found = jnp.where(index == i, one, found)
    return found


def _solve(handler: Handler, at: At, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Return what the function computes that solves: others are for derivatives."""
    lengths, jaxprs = eqn.params["const_lengths"], eqn.params["jaxprs"]
    first, last = sum(lengths[:2]), sum(lengths)
    constants = operands[first : first + lengths.solve]
    return written_out(jaxprs.solve, handler, [*constants, *operands[last:]], at)


RULES: Mapping[str, Callable[..., list[Any]]] = {
    "scan": _scan,
    "cond": _cond,
    "custom_linear_solve": _solve,
}
"""By primitive, how an equation is made again."""
_STAY = ("while",)
"""Loops whose steps only a run can tell, and which stay loops."""
