"""optimize: run passes over the parameters of a plan, and tell what they did to each."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from interception_core.log import progress
from provider_xla import QuantizationError
from provider_xla.features import (
    Largest,
    Site,
    as_batch,
    by_path,
    carried,
    check_parameters,
    followed,
    follows_values,
    prepacked,
    probe,
    quantize_leaf,
    table,
    whole_results,
)

from .layout import Layout, Operand, as_matrices, layouts, rows_of
from .state import Pass, Weight

if TYPE_CHECKING:
    from provider_xla import Plan


@dataclasses.dataclass(frozen=True)
class WeightErrors:
    """The error of one parameter, after rounding and after each pass.

    An error is that of the results of its contractions with the float activations of the batches:
    the root of the mean squared difference, relative to that of the results.

    Attributes:
        path: its pytree path.
        qtype: the name of its quantized type.
        rounded: the error of rounding alone; None if no pass can change the parameter.
        after: the error after each pass, by the name of the pass.
        reasons: by the name of a pass, why it left the parameter as it was; under ``""``, why no
            pass can change it.
    """

    path: str
    qtype: str
    rounded: float | None
    after: Mapping[str, float]
    reasons: Mapping[str, str]


class PassReport(tuple[WeightErrors, ...]):
    """What passes did to each parameter. ``print(report)`` shows a table."""

    __slots__ = ()

    def as_json(self) -> list[dict[str, Any]]:
        """Return the rows as JSON values."""
        return [dataclasses.asdict(row) for row in self]

    def __str__(self) -> str:
        names = list(dict.fromkeys(name for row in self for name in row.after))
        headers = ["weight", "qtype", "rounding", *names, "left as it was"]
        rows = []
        for row in self:
            why = "; ".join(f"{name}: {why}" if name else why for name, why in row.reasons.items())
            errors = [row.rounded, *(row.after.get(name) for name in names)]
            cells = ["" if error is None else f"{error:.5f}" for error in errors]
            rows.append([row.path, row.qtype, *cells, why])
        return table(rows, headers)


class Optimized(NamedTuple):
    """What ``plan.optimize`` returns.

    Attributes:
        params: stored parameters, as ``plan.quantize`` returns them, for ``plan.apply``.
        report: what each pass did to each parameter.
    """

    params: Any
    report: PassReport


GRAM_BYTES = 2**31
"""Bytes of Gram matrices that are measured at once; for more, the batches are run again."""


def optimize(
    plan: Plan,
    params: Any,
    batches: Iterable[Sequence[Any]],
    passes: Sequence[Pass],
    *,
    donate: bool,
    prepack: bool,
) -> Optimized:
    """Run passes: see ``Plan.optimize``."""
    passes = _checked(passes)
    if not follows_values(plan.engine):
        raise QuantizationError(
            "plan.optimize needs the trace engine, which hands stored parameters on: make the "
            "plan with PtqProvider(rules, engine='trace')."
        )
    batches = list(map(as_batch, batches))
    if not batches:
        raise QuantizationError("There is nothing to measure from: batches is empty.")
    given, treedef = by_path(params, plan.prefix)
    check_parameters(plan, given)
    names = [*given]
    given |= {
        path: weight.derived.expression.evaluate(given)
        for path, weight in plan.weights.items()
        if weight.derived is not None
    }
    for path, weight in plan.weights.items():
        weight.check(given[path])

    seen, operands = layouts(plan, params, batches[0])
    if any(one.sequential for one in passes):
        seen = dict(sorted(seen.items(), key=lambda item: _place(plan, item[0])))
    stored: dict[str, Any] = {}
    rows: dict[str, WeightErrors] = {}
    model = _Model(plan, params, batches, operands)
    with progress(total=len(plan.weights), desc="optimizing", unit="weight") as bar:
        for path, weight in plan.weights.items():
            why = seen[path]
            if isinstance(why, str):
                stored[path] = quantize_leaf(weight, given[path], check=False)
                rows[path] = WeightErrors(path, weight.qtype, None, {}, {"": why})
                bar.update()
        for part in _parts({p: one for p, one in seen.items() if isinstance(one, Layout)}):
            for weight, row in _run(model, given, part, passes):
                stored[weight.path] = _placed(weight.stored(), given[weight.path])
                rows[weight.path] = row
                bar.update()
    leaves = []
    for path in names:
        leaf = given[path]
        q = carried(plan, path, leaf, jax.block_until_ready(stored.get(path, leaf)), stored)
        kept = jax.tree.leaves(q)
        if donate and isinstance(leaf, jax.Array) and not any(one is leaf for one in kept):
            leaf.delete()
        leaves.append(prepacked(plan, path, q) if prepack else q)
    # No operation uses a parameter that is stored beside what is computed from it.
    report = PassReport(rows[path] for path, weight in plan.weights.items() if weight.ops)
    return Optimized(jax.tree.unflatten(treedef, leaves), report)


def _checked(passes: Sequence[Pass]) -> list[Pass]:
    """Return the passes; raise if their kind or order is wrong."""
    passes = list(passes)
    for one in passes:
        if not isinstance(one, Pass):
            raise TypeError(
                f"passes must hold passes such as Gptq(), Awq() or Hadamard(), got {one!r}."
            )
    for first, second in itertools.pairwise(passes):
        if first.stage > second.stage or (first.stage == second.stage and first.stage > 0):
            raise ValueError(
                f"{second.name} can't follow {first.name}: passes that transform channels "
                "(SmoothQuant, Awq, Hadamard) come first, then Wanda, which chooses zeros, then "
                "Ranges, then Gptq, which chooses quantized values; each of these three once."
            )
    return passes


def _parts(seen: Mapping[str, Layout]) -> Iterator[dict[str, Layout]]:
    """Yield parameters whose Gram matrices are measured together."""
    part: dict[str, Layout] = {}
    total = 0
    for path, layout in seen.items():
        size = 4 * layout.k**2 * math.prod(layout.steps)
        if part and total + size > GRAM_BYTES:
            yield part
            part, total = {}, 0
        part[path] = layout
        total += size
    if part:
        yield part


class _Model(NamedTuple):
    """The model that activations are measured in.

    Attributes:
        plan: its plan.
        params: its parameters.
        batches: the other arguments of each call.
        operands: the weight that each operand is, by operation id and side.
    """

    plan: Plan
    params: Any
    batches: Sequence[Sequence[Any]]
    operands: Mapping[tuple[str, int], Operand]

    def with_values(self, values: Mapping[str, jax.Array]) -> _Model:
        """Return it with other values of some parameters, by path."""
        given, treedef = by_path(self.params, self.plan.prefix)

        def placed(path: str, leaf: Any) -> Any:
            if path not in values:
                return leaf
            new = values[path].astype(leaf.dtype)
            return jax.device_put(new, leaf.sharding) if isinstance(leaf, jax.Array) else new

        leaves = [placed(path, leaf) for path, leaf in given.items()]
        return self._replace(params=jax.tree.unflatten(treedef, leaves))


def _run(
    model: _Model, given: Mapping[str, Any], part: Mapping[str, Layout], passes: Sequence[Pass]
) -> Iterator[tuple[Weight, WeightErrors]]:
    """Run the passes over some parameters, and yield each when it is done."""
    plan = model.plan
    grams = _measured(model, part, gram)
    weights = {}
    for path, layout in part.items():
        g = _checked_gram(path, layout, grams)
        w = as_matrices(given[path], layout)
        below = path.removeprefix(plan.prefix)
        weights[path] = Weight(path, below, plan.weights[path], layout, w, g)
    rounded = {path: weight.error() for path, weight in weights.items()}
    after: dict[str, dict[str, float]] = {path: {} for path in weights}
    reasons: dict[str, dict[str, str]] = {path: {} for path in weights}
    names = _names(passes)
    for name, one in zip(names, passes, strict=True):
        if one.needs_peaks:
            steps = {path: weight.steps for path, weight in weights.items()}
            peaks = _measured(model, part, lambda rows: Largest(rows), steps)
            for path, weight in weights.items():
                weight.peaks = peaks[path].value.reshape(-1, weight.layout.k)
        if one.sequential:
            _run_in_turn(one, model, weights)
        for path, weight in weights.items():
            why = None if one.sequential else one.run(weight)
            if why is not None:
                reasons[path][name] = why
            after[path][name] = weight.error()
    for path, weight in weights.items():
        qtype = weight.plan.qtype
        yield weight, WeightErrors(path, qtype, rounded[path], after[path], reasons[path])


def _checked_gram(path: str, layout: Layout, grams: Mapping[str, jax.Array]) -> jax.Array:
    """Return the Gram matrices of a parameter's activations, [S, K, K]."""
    g = grams[path].reshape(-1, layout.k, layout.k)
    if not bool(jnp.isfinite(g).all()):
        raise QuantizationError(
            f"The activations that {path} is multiplied with are not finite in these batches. "
            "Find out where that comes from, or leave it float by a rule without qtypes."
        )
    return g


def _place(plan: Plan, path: str) -> int:
    """Return which operation is the first to use a weight."""
    uses = plan.weights[path].ops
    return next((i for i, record in enumerate(plan.ops) if record.op_id in uses), len(plan.ops))


def _turns(plan: Plan, weights: Mapping[str, Weight]) -> list[tuple[Weight, int]]:
    """Return the parameters in the order of their use, and the steps of loops around them.

    Parameters of equally many steps that follow each other are taken to be of one loop.
    """
    placed = sorted((_place(plan, path), path) for path in weights)
    turns: list[tuple[Any, Weight, int]] = []
    loop: tuple[Any, int] = (None, 0)
    for place, path in placed:
        weight = weights[path]
        if not weight.layout.steps or loop[0] != weight.layout.steps:
            loop = weight.layout.steps or None, place
        turns += [((loop[1], step, place), weight, step) for step in range(len(weight.w))]
    return [(weight, step) for _, weight, step in sorted(turns, key=lambda turn: turn[0])]


def _run_in_turn(one: Pass, model: _Model, weights: Mapping[str, Weight]) -> None:
    """Run a pass along the depth of a model, whose activations are measured again on the way.

    Weights that are computed from parameters stay float for what comes after them.
    """
    turns = _turns(model.plan, weights)
    count = min(one.sequential, len(turns))
    values: dict[str, jax.Array] = {}
    for number in range(count):
        own = turns[number * len(turns) // count : (number + 1) * len(turns) // count]
        layouts = {weight.path: weight.layout for weight, _ in own}
        grams = {path: weights[path].gram for path in layouts}
        if values:  # else they are those of the float model
            found = _measured(model.with_values(values), layouts, gram)
            for path, layout in layouts.items():
                grams[path] = weights[path].mapped(_checked_gram(path, layout, found))
        exact = {path: np.asarray(one, np.float64) for path, one in grams.items()}
        for weight, step in own:
            one.run_step(weight, step, exact[weight.path][step])
        for path in layouts:
            if weights[path].plan.derived is None:
                values[path] = weights[path].so_far()


def _names(passes: Sequence[Pass]) -> list[str]:
    """Return a name per pass, numbered where several are of a kind."""
    names: list[str] = []
    for i, one in enumerate(passes):
        count = sum(other.name == one.name for other in passes[:i])
        names.append(f"{one.name} {count + 1}" if count else one.name)
    return names


def gram(rows: jax.Array) -> jax.Array:
    """Return ``x.T @ x`` of float32 [rows, K]."""
    return jnp.matmul(rows.T, rows, precision="highest")


def _measured(
    model: _Model,
    part: Mapping[str, Layout],
    measure: Any,
    steps: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, Any]:
    """Return a measure of each parameter's activations, by path.

    ``measure`` takes activations, float32 [rows, K], after the maps in ``steps``, and returns an
    array or a ``Largest``.
    """
    paths: dict[str, str] = {}

    def visit(site: Site) -> Any:
        for side in range(2):
            path, axes = model.operands.get((site.call.op_id, side), (None, ()))
            if path in part:
                paths[site.call.op_id] = path
                before = [_of_step(step, site, side) for step in (steps or {}).get(path, ())]
                rows = functools.partial(rows_of, site, side, axes)

                def measured(x: jax.Array, before: Any, rows: Any = rows) -> Any:
                    found = rows(x)
                    for step in before:
                        found = step.forward(found)
                    found = measure(found)
                    is_largest = isinstance(found, Largest)
                    return Largest(jnp.abs(found.value).max(0)) if is_largest else found

                return whole_results(measured, site.operands[1 - side], before)
        return None

    totals: dict[str, Any] = {}
    for op_id, one in probe(model.plan, model.params, model.batches, visit).items():
        path = paths[op_id]
        if path not in totals:
            totals[path] = one.total
        elif isinstance(one.total, Largest):
            totals[path] = Largest(jnp.maximum(totals[path].value, one.total.value))
        else:
            totals[path] = totals[path] + one.total
    return totals


def _of_step(step: Any, site: Site, side: int) -> Any:
    """Return the activations' transformation in the loop step of a site."""
    held = getattr(site.call.proxy(site.operands[side]), "moving", None)
    number = 0 if held is None else held.scale.reshape(()).astype(jnp.int32)
    return jax.tree.map(lambda x: x[number], step)


def _placed(stored: Any, leaf: Any) -> Any:
    """Return a stored parameter sharded as the parameter was."""
    sharding = getattr(leaf, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return stored
    return jax.tree.map(
        lambda x: jax.device_put(x, followed(sharding, leaf.shape, x.shape)), stored
    )
