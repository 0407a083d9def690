"""Stored parameters: quantized by a plan, and packed for kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from hijax_trace import Carrier
from interception_core import platform_of

from ..errors import QuantizationError
from ..forms.tree import is_stored, map_forms, own_form
from ..program.arrays import by_path, is_array, map_params, rebuilt
from ..program.sites import short
from ..tables import progress
from .weight import WeightPlan, portable_leaf, prepack_leaf, quantize_leaf


def quantize(plan: Any, params: Any, *, donate: bool = False, prepack: bool = True) -> Any:
    """Quantize the parameters: see ``Plan.quantize``."""
    given, treedef = by_path(params, plan.prefix)
    is_again = any(map(is_stored, jax.tree.leaves(params, is_leaf=is_stored)))
    check_parameters(plan, given, is_again=is_again)
    if donate:
        for path, weight in plan.weights.items():
            if weight.derived is None:
                weight.check(given[path])
    # Derived weights first: a parameter that is donated is gone once it is quantized.
    derived = {one.path: stored for one, stored in _derived(plan, given, prepack)}
    leaves = []
    total = sum(getattr(leaf, "nbytes", 0) for leaf in given.values())
    # Gone at the end within a bar of the caller.
    how = {"unit": "B", "unit_scale": True, "desc": "quantizing", "leave": None}
    with progress(total=total, **how) as bar:
        for path, leaf in given.items():
            size = getattr(leaf, "nbytes", 0)
            stored, weight = leaf, plan.weights.get(path)
            if weight is not None:
                stored = quantize_leaf(weight, leaf, check=not donate)
                stored = prepack_leaf(weight, stored) if prepack else stored
            stored = carried(plan, path, leaf, stored, derived)
            is_kept = own_form(stored) is leaf
            if donate and isinstance(leaf, jax.Array) and not is_kept:
                leaf.delete()
            leaves.append(stored)
            bar.update(size)
    return rebuilt(treedef, leaves)


def check_parameters(
    plan: Any, given: Mapping[str, Any], *, are_types: bool = False, is_again: bool = False
) -> None:
    """Raise QuantizationError unless parameters, or their types, are those of a plan.

    Args:
        plan: the plan.
        given: the parameters by path.
        are_types: whether they may be types.
        is_again: whether some are stored already.
    """
    arrays = {path for path, leaf in given.items() if path in plan.leaves or is_array(leaf)}
    for path in sorted(plan.leaves.keys() ^ arrays):
        what = "missing" if path in plan.leaves else "unexpected"
        raise QuantizationError(
            f"The parameters must be a tree like the plan's, got another: {path} is {what}. "
            + (
                "Some are stored already: pass them to plan.apply(), or quantize what "
                "plan.dequantize() makes of them."
                if is_again
                else "Make the plan for these parameters."
            )
        )
    for path, expected in plan.leaves.items():
        leaf = given[path]
        about = f"{path}{_because(plan, path)}"
        is_type = isinstance(leaf, jax.ShapeDtypeStruct) and not are_types
        if is_type or not hasattr(leaf, "shape"):
            raise QuantizationError(
                f"{about} is {leaf!r}, and only arrays can be quantized. Plan with abstract "
                "parameters, quantize real ones; plan.quantized_types has the types of the result."
            )
        if leaf.shape != expected.shape or leaf.dtype != expected.dtype:
            raise QuantizationError(
                f"{about} is {short(leaf)}, but the plan was made for {short(expected)}. "
                "Make the plan for these parameters."
            )


def _because(plan: Any, path: str) -> str:
    weight = plan.weights.get(path)
    return "" if weight is None else f" (rule {weight.rule})"


def _derived(
    plan: Any, given: Mapping[str, Any], prepack: bool
) -> Iterator[tuple[WeightPlan, Any]]:
    """Yield the derived weights, with what is stored for each."""
    for weight in plan.weights.values():
        if weight.derived is not None:
            inputs = {path: given[path] for path in weight.derived.leaves}
            stored = quantize_leaf(weight, weight.derived.expression.evaluate(inputs))
            yield weight, prepack_leaf(weight, stored) if prepack else stored


def carried(plan: Any, path: str, leaf: Any, stored: Any, derived: Mapping[str, Any]) -> Any:
    """Return a stored parameter with the derived weights, by name, that are stored for it."""
    beside = plan.beside(path)
    if not beside and path not in plan.absorbed and path not in plan.derived_from:
        return stored
    made = {key: weight.derived for key, weight in beside.items() if weight.derived}
    return Carrier(
        None if path in plan.absorbed else stored,
        {key: derived[weight.path] for key, weight in beside.items()},
        tuple((key, one.expression.loops) for key, one in made.items()),
        plan.rules.is_parameter,
        tuple(leaf.shape),
        leaf.dtype,  # that of a PRNG key is JAX's
        tuple((key, tuple(one.leaves)) for key, one in made.items()),
    )


def prepack(plan: Any, params: Any, platform: str | None = None) -> Any:
    """Pack quantized parameters for kernels: see ``Plan.prepack``."""
    return map_params(
        lambda path, leaf: prepacked(plan, path, leaf, platform), params, plan.prefix, is_stored
    )


def convert(plan: Any, params: Any, platform: str | None = None) -> Any:
    """Change the form of stored parameters: see ``Plan.convert``."""
    portable = map_params(
        lambda path, leaf: _each(plan, path, leaf, portable_leaf), params, plan.prefix, is_stored
    )
    return portable if platform is None else prepack(plan, portable, platform_of(platform))


def prepacked(plan: Any, path: str, leaf: Any, platform: str | None = None) -> Any:
    """Return a stored leaf, packed for kernels where the plan says so.

    Raises:
        QuantizationError: the leaf is quantized in another way than the plan says.
    """

    def one(weight: WeightPlan | None, held: Any) -> Any:
        return held if weight is None else prepack_leaf(weight, held, platform)

    return _each(plan, path, leaf, one)


def _each(plan: Any, path: str, leaf: Any, change: Callable[[WeightPlan | None, Any], Any]) -> Any:
    """Return a leaf with each stored part changed by its plan."""
    own, derived = plan.weights.get(path), plan.derived
    return map_forms(lambda key, held: change(derived.get(key) if key else own, held), leaf)
