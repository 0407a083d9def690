"""Stored parameters: quantized by a plan or as types say, and packed for kernels."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
from jax.sharding import NamedSharding

import quant_numerics as qn
from hijax_trace import Carrier
from interception_core import platform_of
from interception_core.log import progress

from ..errors import QuantizationError
from ..kernels.packed import of_panels, pack, packed_type, packing_of
from ..program.arrays import (
    as_jax,
    by_path,
    followed,
    is_array,
    is_stored,
    map_forms,
    map_params,
    own_form,
    rebuilt,
)
from ..program.sites import short
from .weight import WeightPlan, prepack_leaf, quantize_leaf


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
        if leaf.shape != expected.shape or as_jax(leaf.dtype) != expected.dtype:
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
    """Return a stored parameter with the derived weights, by name, that are stored for it.

    One that no rule quantizes has the dtype of the program's input, as quantized ones have.
    """
    # Leaves of other kinds are neither in a plan's list of arrays nor changed.
    dtype: Any = plan.leaves[path].dtype if path in plan.leaves else None
    if stored is leaf and dtype is not None and leaf.dtype != dtype:
        is_type = isinstance(leaf, jax.ShapeDtypeStruct)
        stored = leaf.update(dtype=dtype) if is_type else leaf.astype(dtype)
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
        dtype,  # that of a PRNG key is JAX's
        tuple((key, tuple(one.leaves)) for key, one in made.items()),
    )


def prepack(plan: Any, params: Any, platform: str | None = None) -> Any:
    """Pack quantized parameters for kernels: see ``Plan.prepack``."""
    return map_params(
        lambda path, leaf: prepacked(plan, path, leaf, platform), params, plan.prefix, is_stored
    )


def convert(plan: Any, params: Any, platform: str | None = None) -> Any:
    """Change the form of stored parameters: see ``Plan.convert``."""

    # Packing repeats scales, and the plan knows of what shape they were.
    def one(weight: WeightPlan | None, held: Any) -> Any:
        shape = None if weight is None else weight.granularity.scale_shape(weight.shape)
        return held.portable(shape)

    portable = map_params(
        lambda path, leaf: _each(plan, path, leaf, one), params, plan.prefix, is_stored
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


def quantized_types(plan: Any, params: Any, *, prepack: bool = True) -> Any:
    """Return the types of what ``Plan.quantize`` stores: see ``Plan.quantized_types``."""
    given, treedef = by_path(params, plan.prefix)
    check_parameters(plan, given, are_types=True)
    derived = {}
    for weight in plan.derived.values():
        assert weight.derived is not None
        inputs = {path: given[path] for path in weight.derived.leaves}
        value = jax.eval_shape(weight.derived.expression.evaluate, inputs)
        derived[weight.path] = _stored_type(weight, value, prepack)
    leaves = []
    for path, leaf in given.items():
        weight = plan.weights.get(path)
        stored = leaf if weight is None else _stored_type(weight, leaf, prepack)
        leaves.append(carried(plan, path, leaf, stored, derived))
    return rebuilt(treedef, leaves)


def _stored_type(weight: WeightPlan, leaf: Any, prepack: bool) -> Any:
    """Return the type, with its sharding, of a parameter's stored form."""
    sharding = getattr(leaf, "sharding", None)
    stored = jax.eval_shape(weight.quantized, weight.abstract())
    packing = weight.packings.get(weight.platform) if prepack else None
    if packing is not None and packing.unshardable(weight.shape, sharding) is None:
        panels = of_panels(packing, len(weight.shape), sharding)
        packed = packed_type(stored, packing)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=panels), packed
        )
    if not isinstance(sharding, NamedSharding):
        return stored

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        own = followed(sharding, weight.shape, x.shape)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=own)

    return jax.tree.map(placed, stored)


def quantize_params(params: Any, like: Any) -> Any:
    """Quantize float parameters to the forms that a tree of stored ones has.

    It is Qwix's function, for ``like = jax.eval_shape(quantized.init, key, x)["params"]`` of a
    quantized Linen module. Where there is a plan, ``plan.quantize(params)`` does the same.

    Args:
        params: float arrays.
        like: a tree of the same structure with stored parameters, or their types.

    Returns:
        The tree of ``like`` with values: rounded to nearest, with scales of the largest magnitude.

    Raises:
        QuantizationError: the trees differ, or a form needs more than the parameter: derived
            weights and what passes made are quantized by their plan.
    """
    wanted, treedef = jax.tree.flatten(like, is_leaf=is_stored)
    try:
        given = treedef.flatten_up_to(params)
    except ValueError as error:
        raise QuantizationError(
            f"params must be a tree like the stored one, got another: {error}"
        ) from error
    return jax.tree.unflatten(treedef, list(map(_quantized, given, wanted)))


def _quantized(x: Any, wanted: Any) -> Any:
    if tuple(getattr(x, "shape", ())) != tuple(getattr(wanted, "shape", ())):
        raise QuantizationError(
            f"A parameter must have shape {list(wanted.shape)}, got {list(getattr(x, 'shape', []))}"
            ". Give the parameters of the model that was quantized."
        )
    if not is_stored(wanted):
        if not jax.tree_util.all_leaves([x]):
            raise QuantizationError(
                f"params must be a tree like the stored one, got a {type(x).__name__} where that "
                f"has a {type(wanted).__name__}. Quantize it by its plan: plan.quantize(params)."
            )
        return x
    if not qn.is_form(wanted) or wanted.values is not wanted:
        raise QuantizationError(
            f"A {type(wanted).__name__} holds more than its parameter says. Quantize it by its "
            "plan: plan.quantize(params) or plan.optimize(...)."
        )
    pairs = enumerate(zip(wanted.shape, wanted.scale_shape, strict=True))
    counts = {axis: (n, count) for axis, (n, count) in pairs if count > 1}
    q = qn.quantize(
        x,
        wanted.qtype,
        channel_axes=[axis for axis, (n, count) in counts.items() if n == count],
        tile_axes={axis: n // count for axis, (n, count) in counts.items() if n != count},
        scale_dtype=getattr(wanted, "scale_dtype", None) or wanted.scale.dtype.name,
    )
    if wanted.platform is not None:
        return pack(q, packing_of(wanted))
    return qn.pack(q) if isinstance(wanted, qn.PackedQArray) else q
