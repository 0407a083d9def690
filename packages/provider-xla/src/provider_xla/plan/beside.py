"""Beside: parameters that stay stored beside the weights derived from them.

A derived weight is a value of the call that was planned. Another call may compute another value:
of another length, number or static argument. It is computed from the parameters, so they stay
stored where the expression shows that it may differ. Where it shows nothing of the kind
(``w + a @ b``), a copy would double the size for nothing, and a call that needs it is an error.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping
from typing import Any

import jax

import quant_numerics as qn
from hijax_trace import Expression, used_inputs

from ..program.arrays import by_path, is_array, of_arrays
from ..program.facts import Code
from ..program.sites import Site
from .quantize import carried
from .weight import Granularity, WeightPlan

_CUTS = ("dynamic_slice", "gather", "pad", "slice")


def has_numbers(args: tuple, kwargs: Mapping[str, Any]) -> bool:
    """Return whether a call has arguments that are not arrays: numbers, flags, names."""
    leaves = jax.tree.leaves((args, dict(kwargs)))
    return any(isinstance(leaf, bool | int | float | complex | str) for leaf in leaves)


def may_differ(expression: Expression, with_numbers: bool) -> bool:
    """Return whether another call may compute another value at the same place.

    With arguments that are not arrays, a number may be part of it, and a flag may choose another.
    """
    return with_numbers or any(map(_is_of_call, expression.nodes()))


def _is_of_call(node: Expression) -> bool:
    aval: Any = node.aval
    if not node.operands and node.is_constant:
        # One may be as long as an activation, the other the state of a model.
        is_number = math.prod(getattr(aval, "shape", ())) == 1
        return not is_number or isinstance(getattr(node, "value", None), jax.Array)
    name = getattr(getattr(node, "primitive", None), "name", None)
    if name is None:
        return False
    if not node.operands:
        return True  # iota and others that are made of sizes alone
    if name not in _CUTS:
        return False
    full: Any = node.operands[0].aval
    # One index of an axis is a choice among parts. Several, but not all, are a length.
    if len(aval.shape) != len(full.shape):
        return False
    return any(1 < n != whole for n, whole in zip(aval.shape, full.shape, strict=True))


def kept_beside(
    weights: Mapping[str, WeightPlan], paths: Collection[str], leaves: Mapping[str, Any]
) -> dict[str, WeightPlan]:
    """Return how parameters are stored that only derived weights use.

    Each has the format of the derived weight that it is in, and a scale for each slice along its
    longest axis, or for each tile of that. Parameters smaller than the derived weight, such as the
    factors of a product or a vector of gains, have no entry: they stay as they are.
    """
    found = {}
    for path in paths:
        leaf = leaves[path]
        users = [one for one in weights.values() if one.derived and path in one.derived.leaves]
        if not users or leaf.dtype not in qn.FLOAT_DTYPES or not is_array(leaf):
            continue
        first = users[0]
        if leaf.size < math.prod(first.shape) or not leaf.size:
            continue
        along = max(range(len(leaf.shape)), key=lambda axis: leaf.shape[axis])
        tile = next(iter(first.granularity.tile_axes.values()), None)
        fits = tile is not None and leaf.shape[along] % tile == 0
        if qn.get_qtype(first.qtype).block is not None and not fits:
            continue
        channels = tuple(axis for axis in range(len(leaf.shape)) if axis != along)
        tiles = {along: tile} if fits and tile is not None else {}
        found[path] = dataclasses.replace(
            first,
            path=path,
            shape=tuple(leaf.shape),
            dtype=leaf.dtype,
            granularity=Granularity(channels, tiles),
            stepped=(),
            ops=(),
            packings={},
            sparsity=None,
            derived=None,
        )
    return found


def with_kept(
    plan: Any,
    params: Any,
    args: tuple,
    kwargs: Mapping[str, Any],
    given: Mapping[str, Any],
    survey: Any,
) -> Any:
    """Return a plan that stores parameters beside derived weights of which calls may differ.

    Others of which nothing but derived weights is used are ``absorbed``. ``given`` are the
    parameters by path, and ``survey`` what the plan is made of.
    """
    derived = [weight.derived for weight in plan.derived.values() if weight.derived is not None]
    absorbed = _absorbed(plan, args, kwargs)
    # Calls with adapters compute the derived weights that depend on them.
    changing = [one for one in derived if not plan.adapters.keys().isdisjoint(one.leaves)]
    absorbed -= {path for one in changing for path in one.leaves}
    # Where a call is jitted, numbers among the parameters are arrays, and part of no expression.
    with_numbers = has_numbers((params, *args), kwargs)
    differing = [one for one in derived if may_differ(one.expression, with_numbers)]
    used = {path for one in differing for path in one.leaves}
    # A number or a random key of the parameters is smaller than what is derived from it.
    others = (path for path in absorbed if plan.leaves[path].dtype not in qn.FLOAT_DTYPES)
    kept = (absorbed & used).union(others)
    stored = {
        path: survey.with_scales(weight, given.get(path))
        for path, weight in kept_beside(plan.weights, sorted(kept), plan.leaves).items()
    }
    notes = {
        Code.BESIDE(paths=(path,), derived=names): None
        for path in stored
        if (names := tuple(one.path for one in differing if path in one.leaves))
    }
    return dataclasses.replace(
        plan,
        weights={**plan.weights, **stored},
        absorbed=absorbed - kept,
        remarks=tuple({**survey.notes, **notes}),
    )


def _absorbed(plan: Any, args: tuple, kwargs: Mapping[str, Any]) -> frozenset[str]:
    """Return the parameters that nothing but derived weights uses."""
    # Trace the program with the derived weights given, and see which parameters it still reads.
    derived = {
        weight.path: jax.eval_shape(
            weight.quantized, jax.ShapeDtypeStruct(weight.shape, weight.dtype)
        )
        for weight in plan.weights.values()
        if weight.derived is not None
    }

    tapped = plan.tap(in_float)

    def program(leaves: Mapping[str, Any], derived: Mapping[str, Any], *args: Any) -> Any:
        stored = [
            carried(plan, path, leaf, leaf, derived) if path in plan.leaves else leaf
            for path, leaf in {**everything, **leaves}.items()
        ]
        return tapped(*plan.arguments(jax.tree.unflatten(treedef, stored), args), **kwargs)

    everything, treedef = by_path(plan.params, plan.prefix)
    call, arrays = of_arrays(program, [dict(plan.leaves), derived, *args], {})
    used = used_inputs(jax.make_jaxpr(call)(arrays).jaxpr)
    # The first arguments are the parameters, in the order of their paths.
    names = sorted(plan.leaves)
    unused = {path for path, one in zip(names, used, strict=False) if not one}
    # What this program never uses is stored: another one, such as another method, may.
    return plan.derived_from & unused


def in_float(site: Site) -> Any:
    """Return an operation's result with the arrays of its proxies."""
    held = [site.call.proxy(operand) for operand in site.operands]
    operands = [
        x if one is None else one.restore().astype(x.dtype)
        for x, one in zip(site.operands, held, strict=True)
    ]
    return site.contraction.run(*operands, *site.extras)
