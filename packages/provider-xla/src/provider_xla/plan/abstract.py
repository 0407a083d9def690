"""The types of stored parameters, to lower and compile programs without parameters."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from interception_core import followed_spec

from ..kernels.packing import of_panels, packed_type
from ..program.arrays import by_path, rebuilt
from .quantize import carried, check_parameters
from .weight import WeightPlan


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
    spec = (*sharding.spec, *(None,) * (len(weight.shape) - len(sharding.spec)))

    def placed(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        along, sizes = spec, weight.shape
        if len(x.shape) > len(sizes):  # bit planes, whose bits come before the last axis
            along, sizes = (*spec[:-1], None, None), (*sizes[:-1], *x.shape[-2:])
        followed = followed_spec(sharding.mesh, along, sizes, x.shape)
        followed = NamedSharding(sharding.mesh, followed)
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=followed)

    return jax.tree.map(placed, stored)
