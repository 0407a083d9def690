"""Probe: measure each operation while a program runs in float, by the steps of loops."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap
from jax.sharding import NamedSharding, PartitionSpec

import quant_numerics as qn
from hijax_trace import ArrayProxy, Box, Carrier, MoveError
from interception_core import OpCall, explicit_mesh, with_auto_axes
from quant_numerics import Contraction

from ..errors import QuantizationError
from ..plan.weight import WeightPlan
from ..program.arrays import by_path, is_stored, map_params, of_arrays, unpacked_leaf
from ..program.matching import follows_values
from ..program.record import lookup_id
from ..program.sites import Site

if TYPE_CHECKING:
    from ..plan.plan import Plan


class _Numbered(ArrayProxy):
    """A parameter with the step number of each of its parts.

    The number must follow the parameter through transposes and backward scans. So it is the scale
    of a QArray, whose quantized values are the parameter's values, and moves as scales do. The
    stored parameter, if given, moves along, too.
    """

    def __init__(self, moving: qn.QArray, stored: ArrayProxy | None = None, stepped: bool = True):
        self.moving = moving
        self.stored = stored
        self.stepped = stepped

    @property
    # pyrefly: ignore [bad-override]
    def shape(self) -> tuple[int, ...]:
        return self.moving.shape

    @property
    # pyrefly: ignore [bad-override]
    def dtype(self) -> np.dtype:
        return self.moving.dtype

    def restore(self) -> jax.Array:
        return self.moving.qvalue.astype(self.dtype)

    def moved(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        how = self.move(primitive, params, operands)

        def of(part: str) -> Sequence[Any]:
            own = list(operands)
            for i in how.data:
                own[i] = getattr(operands[i], part)
            return getattr(self, part).moved(primitive, params, own)

        moving = of("moving")
        try:
            stored = of("stored") if self.stored is not None else [None] * len(moving)
        except MoveError:
            stored = [None] * len(moving)
        pairs = zip(moving, stored, strict=True)
        return [_Numbered(moved, held, self.stepped) for moved, held in pairs]


jax.tree_util.register_pytree_node(
    _Numbered,
    lambda n: ((n.moving, n.stored), n.stepped),
    lambda stepped, parts: _Numbered(*parts, stepped),
)


def stored_operand(site: Site, side: int) -> ArrayProxy | None:
    """Return an operand's stored form if ``probe`` has it, else None."""
    return stored_by(site.call.proxy(site.operands[side]))


def stored_by(held: Any) -> ArrayProxy | None:
    """Return the stored form that a numbered parameter carries, else None."""
    return held.stored if isinstance(held, _Numbered) else None


def numbered(plan: Plan, params: Any, stored: Any = None) -> Any:
    """Return the parameters, with step numbers where loops step along them."""
    held, _ = by_path(stored, plan.prefix, is_stored)
    held = {path: unpacked_leaf(leaf) for path, leaf in held.items() if is_stored(leaf)}
    derived = plan.derived

    def one(path: str, leaf: Any) -> Any:
        found, weight = held.get(path), plan.weights.get(path)
        if not isinstance(found, Carrier):
            return _with_numbers(weight, leaf, found)
        own = _with_numbers(weight, leaf, found.own)
        beside = {
            key: _with_numbers(derived[key], part.restore(), part)
            for key, part in found.derived.items()
        }
        return dataclasses.replace(found, own=own, derived=beside)

    return map_params(one, params, plan.prefix)


def _with_numbers(weight: WeightPlan | None, leaf: Any, held: Any) -> Any:
    """Return an array with its step numbers, and its stored form if any."""
    held = held if is_stored(held) else None
    if weight is None or not (weight.stepped or held is not None):
        return leaf
    axes = weight.stepped
    sizes = [n if a in axes else 1 for a, n in enumerate(leaf.shape)]
    numbers = jnp.arange(math.prod(sizes), dtype=jnp.float32).reshape(sizes)
    return _Numbered(qn.QArray(leaf, numbers, qtype="int8", dtype=leaf.dtype), held, bool(axes))


def step_of(call: Any, operands: Sequence[Any]) -> jax.Array | None:
    """Return the step that an operation is in; None outside loops."""
    for operand in operands:
        held = call.proxy(operand)
        if isinstance(held, _Numbered) and held.stepped:
            number = held.moving.scale
            if number.size != 1:
                raise QuantizationError(
                    f"{call.op_id} takes several steps of its parameter at once, and these "
                    "can't be told apart. Leave it float by a rule without qtypes."
                )
            return number.reshape(()).astype(jnp.int32)
    return None


Visit = Callable[[Site], Any]
"""Takes an operation that a rule quantizes, with its float operands; returns a pytree of arrays."""

VisitLookup = Callable[["Lookup"], Any]
"""Takes a lookup in a parameter that is quantized; returns a pytree of arrays, or None."""

VisitFloat = Callable[[str, Contraction, tuple[Any, Any], tuple[Any, ...]], Any]
"""Takes a contraction that stays float: its id, the contraction, its operands, its other arrays.
Returns a pytree of arrays."""


class Largest(NamedTuple):
    """A measurement of 0 or more that is merged by its maximum."""

    value: jax.Array


class Lookup(NamedTuple):
    """A lookup in a parameter that is quantized.

    Attributes:
        op_id: as in the plan.
        read: takes an array instead of the parameter; returns what is looked up in it.
        table: the parameter, float, as the lookup gets it.
        stored: the same, quantized as the plan says; None where it can't be followed.
    """

    op_id: str
    read: Callable[[jax.Array], jax.Array]
    table: jax.Array
    stored: ArrayProxy | None


class Probed(NamedTuple):
    """What was measured at one operation; a pytree.

    Attributes:
        total: what the visitor returned, summed over batches, calls and mapped axes (the largest of
            a ``Largest``). If a loop takes the parameter in steps, leading axes hold the totals of
            the steps: those are the axes of the parameter that the operand lacks.
        count: how often the operation was visited, int32 of those leading axes. All examples that
            the program maps over are one visit.
    """

    total: Any
    count: jax.Array


def probe(
    plan: Plan,
    params: Any,
    batches: Iterable[Sequence[Any]],
    visit: Visit,
    *,
    stored: Any = None,
    lookup: VisitLookup | None = None,
    leave: VisitFloat | None = None,
) -> dict[str, Probed]:
    """Run a plan's function in float and measure each quantized operation.

    Results do not change: each operation returns its float result. ``visit`` is traced, once for
    each operation. It must return the same shapes for operations with the same id.

    Args:
        plan: the plan of the function.
        params: its parameters: arrays.
        batches: each the other arguments of a call, as a tuple.
        visit: what to measure; None to leave an operation out. A ``Largest`` in it keeps the
            largest instead of the sum.
        stored: the parameters as ``plan.quantize`` or ``plan.optimize`` returned them, for
            visitors that ask for them by ``stored_operand``.
        lookup: what to measure at lookups; None leaves them out.
        leave: what to measure at contractions that stay float; None leaves them out.

    Returns:
        By operation id, in the order of the program.

    Raises:
        QuantizationError: there is no batch; a parameter's steps can't be told apart; an operation
            is inside of ``shard_map``.
    """
    batches = iter(batches)
    first = next(batches, None)
    if first is None:
        raise QuantizationError("There is nothing to measure from: batches is empty.")
    traces = follows_values(plan.engine)
    lookups = {op.op_id for op in plan.ops if op.op_name == "take"}
    moving = numbered(plan, params, stored) if traces else params

    def tapped(take: Callable[..., Any]) -> Callable[..., Any]:
        def run(site: Site) -> Any:
            take(site.call.op_id, site.call, site.operands, lambda: visit(site))
            return NotImplemented

        def run_lookup(call: Any, operand: Any, *indices: Any, **params: Any) -> Any:
            (weight,) = plan.rules.weights(call, (operand,)).found
            if lookup is None or weight is None or plan.weights.keys().isdisjoint(weight.paths):
                return NotImplemented
            op_id = lookup_id(call)
            if op_id not in lookups:  # a slice that takes a weight out of a stack
                return NotImplemented
            found = Lookup(
                op_id,
                lambda table: call.proceed(table, *indices, **params),
                operand,
                stored_by(call.proxy(operand)),
            )
            take(found.op_id, call, [operand], lambda: lookup(found))
            return NotImplemented

        def run_left(call: OpCall, contraction: Contraction, operands: Any, extras: Any) -> None:
            if leave is not None:
                measured = functools.partial(leave, call.op_id, contraction, operands, extras)
                take(call.op_id, call, (), measured)

        handlers = {"lookup": run_lookup, "leave": run_left}
        return plan.tap(run, keyed=False, **handlers)

    zeros: dict[str, Probed] = {}

    def look(op_id: str, call: Any, operands: Any, measured: Any) -> None:
        found = jax.eval_shape(lambda: Probed(measured(), jnp.ones((), jnp.int32)))
        if jax.tree.leaves(found.total):
            steps = _steps(plan, op_id)
            zeros[op_id] = jax.tree.map(
                lambda x: jax.ShapeDtypeStruct((*steps, *x.shape), x.dtype), found
            )

    jax.eval_shape(*of_arrays(tapped(look), plan.arguments(moving, first), {}))
    boxes: dict[str, Box] = {}

    def measure(op_id: str, call: Any, operands: Any, measured: Any) -> None:
        box = boxes.get(op_id)
        if jax.sharding.get_abstract_mesh().manual_axes:
            raise QuantizationError(
                f"{op_id} can't be measured inside of shard_map, where each device has another "
                "part of its operands. Measure the function that shard_map maps, with all of the "
                "parameters."
            )
        if box is not None:
            found = jax.tree.map(lax.stop_gradient, measured())
            step = step_of(call, operands)
            added = Probed(found, jnp.ones((), jnp.int32))
            box.set(
                jax.tree.map(
                    lambda kept, x: _merged(kept, x, step),
                    box.get(),
                    added,
                    is_leaf=lambda x: isinstance(x, Largest),
                )
            )

    measured = tapped(measure)

    def measuring(totals: Any, *args: Any) -> Any:
        # Made here, Boxes lie where the program does, on one device or on a mesh.
        boxes.update({op_id: Box(total) for op_id, total in totals.items()})
        result = measured(*args)
        return result, {op_id: box.get() for op_id, box in boxes.items()}

    totals = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), zeros)
    order, structure, run = list(totals), jax.tree.structure(totals), None
    for batch in itertools.chain([first], batches):
        call, arrays = of_arrays(measuring, [totals, *plan.arguments(moving, batch)], {})
        run = run or jax.jit(call)
        found = jax.block_until_ready(run(arrays))
        totals = jax.tree.unflatten(structure, found[len(found) - structure.num_leaves :])
    return {op_id: totals[op_id] for op_id in order}


def _steps(plan: Plan, op_id: str) -> tuple[int, ...]:
    """Return the sizes of the loop axes of an operation's first weight."""
    if not follows_values(plan.engine):
        return ()
    for weight in plan.weights.values():
        if op_id in weight.ops and weight.stepped:
            return tuple(weight.shape[axis] for axis in weight.stepped)
    return ()


def _merged(kept: Any, found: Any, step: jax.Array | None) -> Any:
    """Add a measurement at one step, or keep the largest."""
    if isinstance(found, Largest):
        return Largest(_merged_at(_maximum, kept.value, found.value, step))
    return _merged_at(_sum, kept, found, step)


def _merged_at(
    merge: Callable[..., jax.Array], kept: jax.Array, found: jax.Array, step: jax.Array | None
) -> jax.Array:
    at = jnp.zeros((), jnp.int32) if step is None else step
    return merge(kept.reshape(-1, *found.shape), found, at).reshape(kept.shape)


def _over_examples(merge: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Return what merges a measurement at one step, of all mapped examples.

    If ``vmap`` maps over the parameter, each example has another step.
    """
    merged = custom_vmap(merge)

    @merged.def_vmap
    def rule(
        size: int,
        is_batched: Sequence[bool],
        kept: jax.Array,
        found: jax.Array,
        step: jax.Array,
    ) -> tuple[jax.Array, bool]:
        _, of_found, of_step = is_batched
        found = found if of_found else jnp.broadcast_to(found, (size, *found.shape))
        step = step if of_step else jnp.broadcast_to(step, (size, *step.shape))
        return merged(kept, found, step), False

    return merged


_sum = _over_examples(lambda kept, found, step: kept.at[step].add(found))
_maximum = _over_examples(lambda kept, found, step: kept.at[step].max(found))


def whole_results(fn: Callable[..., Any], *operands: Any) -> Any:
    """Call a function whose small results are whole on each device."""
    mesh = explicit_mesh(operands)
    if mesh is None:
        return fn(*operands)
    return with_auto_axes(
        mesh, fn, lambda found: jax.tree.map(lambda _: PartitionSpec(), found), *operands
    )


def whole(x: jax.Array) -> jax.Array:
    """Return an array replicated where explicit mesh axes sharded it."""
    if explicit_mesh(x) is None:
        return x
    assert isinstance(x.sharding, NamedSharding)
    return jax.device_put(x, NamedSharding(x.sharding.mesh, PartitionSpec()))
