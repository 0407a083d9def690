"""Stored parameters: quantized by a plan, and packed for kernels."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from hijax_trace import Carrier

from ..run.stored import is_stored
from .check import check_parameters
from .weight import WeightPlan, prepack_leaf, quantize_leaf

if TYPE_CHECKING:
    from .plan import PlanData


def quantize(plan: PlanData, params: Any, *, donate: bool = False, prepack: bool = True) -> Any:
    """Quantize the parameters: see ``Plan.quantize``."""
    from tqdm import tqdm

    found, treedef = jax.tree_util.tree_flatten_with_path(params)
    given = {plan.prefix + jax.tree_util.keystr(path): leaf for path, leaf in found}
    check_parameters(plan, given)
    if donate:
        for path, weight in plan.weights.items():
            if weight.derived is None:
                weight.check(given[path])
    # Derived weights first: a parameter that is donated is gone once it is quantized.
    derived = {one.path: stored for one, stored in _derived(plan, given, prepack)}
    leaves = []
    total = sum(getattr(leaf, "nbytes", 0) for leaf in given.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="quantizing", disable=None) as bar:
        for path, leaf in given.items():
            size = getattr(leaf, "nbytes", 0)
            stored, weight = leaf, plan.weights.get(path)
            if weight is not None:
                stored = quantize_leaf(weight, leaf, check=not donate)
                stored = prepack_leaf(weight, stored) if prepack else stored
            stored = carried(plan, path, leaf, stored, derived)
            is_kept = stored is leaf or (isinstance(stored, Carrier) and stored.own is leaf)
            if donate and isinstance(leaf, jax.Array) and not is_kept:
                leaf.delete()
            leaves.append(stored)
            bar.update(size)
    return jax.tree.unflatten(treedef, leaves)


def _derived(
    plan: PlanData, given: Mapping[str, Any], prepack: bool
) -> Iterator[tuple[WeightPlan, Any]]:
    """Yield the derived weights, with what is stored for each."""
    for weight in plan.weights.values():
        if weight.derived is not None:
            inputs = {path: given[path] for path in weight.derived.leaves}
            stored = quantize_leaf(weight, weight.derived.expression.evaluate(inputs))
            yield weight, prepack_leaf(weight, stored) if prepack else stored


def carried(plan: PlanData, path: str, leaf: Any, stored: Any, derived: Mapping[str, Any]) -> Any:
    """Return what stands for a parameter: with the derived weights that are stored beside it.

    Args:
        plan: the plan.
        path: of the parameter.
        leaf: the parameter, or its type.
        stored: what is stored for it.
        derived: what is stored for the derived weights, by name.
    """
    beside = plan.beside(path)
    if not beside and path not in plan.absorbed:
        return stored
    return Carrier(
        None if path in plan.absorbed else stored,
        {key: derived[weight.path] for key, weight in beside.items()},
        tuple(
            (key, weight.derived.expression.loops)
            for key, weight in beside.items()
            if weight.derived
        ),
        plan.rules.is_parameter,
        tuple(leaf.shape),
        np.dtype(leaf.dtype),
    )


def prepack(plan: PlanData, params: Any) -> Any:
    """Pack quantized parameters for kernels: see ``Plan.prepack``."""
    found, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_stored)
    leaves = [prepacked(plan, plan.prefix + jax.tree_util.keystr(path), x) for path, x in found]
    return jax.tree.unflatten(treedef, leaves)


def prepacked(plan: PlanData, path: str, leaf: Any) -> Any:
    """Return a leaf of stored parameters, packed for kernels where the plan says so.

    Args:
        plan: the plan.
        path: of the leaf.
        leaf: what is stored there, or an array.

    Raises:
        QuantizationError: it was quantized in another way than the plan's.
    """
    weight = plan.weights.get(path)
    if not isinstance(leaf, Carrier):
        return prepack_leaf(weight, leaf) if weight is not None and is_stored(leaf) else leaf
    beside = plan.derived
    derived = {
        key: prepack_leaf(beside[key], one) if key in beside else one
        for key, one in leaf.derived.items()
    }
    own = leaf.own
    if weight is not None and is_stored(own):
        own = prepack_leaf(weight, own)
    return dataclasses.replace(leaf, own=own, derived=derived)
