"""Measure what quantization does to each parameter."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import jax

from provider_xla import WeightPlan
from provider_xla.features import by_path, is_array, is_stored, own_form

from .errors_at import Sums, difference, error_of
from .results import ParameterQuality

if TYPE_CHECKING:
    from provider_xla import Plan


def measure_parameters(
    plan: Plan, params: Any, stored: Any, packed: Any
) -> tuple[ParameterQuality, ...]:
    """Measure the error of what is stored, and the size of it packed for kernels."""
    given, _ = by_path(params, plan.prefix)
    trees = (jax.tree.leaves(tree, is_leaf=is_stored) for tree in (stored, packed))
    held = dict(zip(given, zip(*trees, strict=True), strict=True))
    # Derived weights have separate rows, so they do not count with their parameter.
    values = {path: leaf for path, leaf in given.items() if is_array(leaf)}
    parts = {path: tuple(map(own_form, pair)) for path, pair in held.items()}
    for path, weight in plan.weights.items():
        if weight.derived is not None:
            key = weight.derived.expression.key
            parts[path] = tuple(one.derived[key] for one in held[weight.derived.carrier])
            values[path] = weight.derived.expression.evaluate(given)
    parameters = []
    for path, leaf in values.items():
        (qvalue, run), weight = parts[path], plan.weights.get(path)
        sums = jax.device_get(_stored_error(leaf, qvalue)) if is_stored(qvalue) else None
        parameters.append(
            ParameterQuality(
                path,
                tuple(leaf.shape),
                leaf.dtype.name,
                None if weight is None else weight.qtype,
                None if weight is None else weight.rule,
                leaf.size * leaf.dtype.itemsize if weight is None or not weight.derived else 0,
                _bytes_run(run, leaf, weight),
                None if sums is None else error_of(sums),
            )
        )
    return tuple(parameters)


def _bytes_run(run: Any, leaf: Any, weight: WeightPlan | None) -> int:
    """Return the bytes that the quantized program has for a parameter."""
    if is_stored(run):
        return run.nbytes
    if run is None:
        return 0
    return leaf.size * leaf.dtype.itemsize if weight is None else weight.bytes_after


@jax.jit
def _stored_error(leaf: jax.Array, held: Any) -> Sums:
    return difference(leaf, held.restore().astype(leaf.dtype))
