"""A program staged for export: each operation of its plan is one equation, with the plan's id.

It is traced once, through the engine that it was planned with, so that its ids are the plan's. What
export runs after that is the staged program: ids are data of its equations, and an operation of a
loop that is written out keeps its own, with the numbers of its step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun

from interception_core import Engine, Interceptor, OpCall
from provider_odml import Plan
from provider_odml.features import Op, is_float, ops, prepared, split

from .._compat import define_transformations


class Place(NamedTuple):
    """The id of an operation, as data. See ``OpCall``."""

    path: str
    label: str
    name: str
    number: int

    def at(self, steps: tuple[int, ...]) -> str:
        """Return the id of the operation in a step of the loops around it."""
        label = f"{self.label}[{','.join(map(str, steps))}]" if steps else self.label
        return f"{'/'.join(filter(None, (self.path, label, self.name)))}:{self.number}"


@dataclass(frozen=True, eq=False)
class Operation:
    """One operation, as the program called it.

    Attributes:
        op: what it is.
        place: where it is.
        leaves: its arguments, flat.
        operands: which of them are traced arrays or arrays of floats.
        structure: of its arguments.
        body: computes its results from the operands.
        out: the structure of its results.
    """

    op: Op
    place: Place
    leaves: tuple[Any, ...]
    operands: tuple[int, ...]
    structure: Any
    body: ClosedJaxpr
    out: Any

    def arguments(self, operands: Sequence[Any]) -> tuple[tuple, dict[str, Any]]:
        """Return its positional and keyword arguments, with other operands."""
        filled = list(self.leaves)
        for place, operand in zip(self.operands, operands, strict=True):
            filled[place] = operand
        return jax.tree.unflatten(self.structure, filled)

    def proceed(self, *args: Any, **kwargs: Any) -> Any:
        """Compute its results from arguments, of which operands alone may be others."""
        leaves = jax.tree.leaves((args, kwargs))
        found = jaxpr_as_fun(self.body)(*(leaves[place] for place in self.operands))
        return jax.tree.unflatten(self.out, found)


operation_p = Primitive("odml_operation")
operation_p.multiple_results = True


@operation_p.def_abstract_eval
def _types(*operands: Any, operation: Operation) -> Any:
    del operands
    return operation.body.out_avals


define_transformations(
    operation_p, lambda operands, operation: jaxpr_as_fun(operation.body)(*operands)
)


@dataclass(frozen=True)
class Staged:
    """A program whose operations are single equations.

    Attributes:
        jaxpr: the program, of the arrays among its arguments.
        out: the types of its results.
    """

    jaxpr: ClosedJaxpr
    out: Any


def stage(
    engine: Engine, fn: Callable[..., Any], plan: Plan, args: tuple, kwargs: dict[str, Any]
) -> Staged:
    """Stage ``fn(*args, **kwargs)``. Nothing is run.

    Args:
        engine: the one that the program was planned with.
        fn: the function.
        plan: its plan.
        args: positional arguments: arrays, and others.
        kwargs: keyword arguments.
    """
    ids = {*plan.decisions, *(d.node.begin for d in plan.decisions.values())}
    targets = {decision.node.op.target for decision in plan.decisions.values()} | plan.functions
    targets |= {f"{target}_begin" for target in targets}
    handlers = {
        target: functools.partial(_keep, ids, op)
        for target, op in ops().items()
        if target in targets
    }
    wrapped = engine.wrap(prepared(fn), Interceptor(handlers))
    arrays, rebuild = split((args, kwargs))

    def run(arrays: list[Any]) -> Any:
        args, kwargs = rebuild(arrays)
        return wrapped(*args, **kwargs)

    return Staged(*jax.make_jaxpr(run, return_shape=True)(arrays))


def _keep(ids: set[str | None], op: Op, call: OpCall, *args: Any, **kwargs: Any) -> Any:
    """Make one equation of an operation of the plan."""
    if call.op_id not in ids:
        return NotImplemented if op.is_primitive else call.proceed(*args, **kwargs)
    leaves, structure = jax.tree.flatten((args, kwargs))
    # Known integers may be options, such as the widths of a padding.
    is_operand = [is_float(x) or isinstance(x, jax.core.Tracer) for x in leaves]
    operands = tuple(i for i, one in enumerate(is_operand) if one)
    arrays = [leaves[i] for i in operands]

    def proceed(*arrays: Any) -> Any:
        filled = list(leaves)
        for place, array in zip(operands, arrays, strict=True):
            filled[place] = array
        args, kwargs = jax.tree.unflatten(structure, filled)
        return call.proceed(*args, **kwargs)

    body, out = jax.make_jaxpr(proceed, return_shape=True)(*arrays)
    place = Place(call.module_path, call.label, call.op_name, call.number)
    # Without the operands: what is kept must not hold a tracer.
    rest = tuple(None if i in operands else x for i, x in enumerate(leaves))
    operation = Operation(op, place, rest, operands, structure, body, jax.tree.structure(out))
    return jax.tree.unflatten(operation.out, operation_p.bind(*arrays, operation=operation))
