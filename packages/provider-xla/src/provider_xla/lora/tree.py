"""Adapters as a pytree: made, and merged into the parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Set
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from hijax_trace import Carrier

from ..errors import QuantizationError
from ..forms.tree import is_stored
from ..plan.lora import LoraForm, LoraPlan, check_adapters
from ..program.arrays import by_path, map_params
from ..program.sites import short
from .contract import delta_of
from .weight import AdaptedWeight, is_adapted, salt, wide

if TYPE_CHECKING:
    from ..plan.plan import Plan


def init_adapters(plan: Plan, key: jax.Array, dtype: Any = None) -> dict[str, dict[str, jax.Array]]:
    """Make adapters that change nothing yet: see ``Plan.init_adapters``."""
    if not plan.lora:
        check_adapters(plan.lora, {})
    dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise QuantizationError(
            f"Adapters are floats, of which gradients can be taken. Got dtype {dtype.name}."
        )
    return {path: _init(one, jax.random.fold_in(key, salt(path)), dtype)
            for path, one in plan.lora.items()}  # fmt: skip


def _init(plan: LoraPlan, key: jax.Array, dtype: Any) -> dict[str, jax.Array]:
    if plan.is_lookup:
        a, b = jnp.zeros(plan.a_shape, dtype), jax.random.normal(key, plan.b_shape, dtype)
    else:
        bound = plan.fan_in**-0.5
        a = jax.random.uniform(key, plan.a_shape, dtype, -bound, bound)
        b = jnp.zeros(plan.b_shape, dtype)
    return {"a": a, "b": b}


def merge(plan: Plan, params: Any, adapters: Mapping[str, Mapping[str, jax.Array]]) -> Any:
    """Return float parameters with the adapters added: see ``Plan.merge``."""
    return merged(adapted(plan, params, adapters), plan.prefix)


def merged(params: Any, prefix: str) -> Any:
    """Return float parameters: AdaptedWeights are added, stored values dequantized."""
    return map_params(_merged_leaf, params, prefix, _is_kept)


def _merged_leaf(path: str, leaf: Any) -> Any:
    base = leaf.base if is_adapted(leaf) else leaf
    if isinstance(base, Carrier):
        if base.own is None:
            do = "merge the adapters into them" if is_adapted(leaf) else "keep them"
            raise QuantizationError(
                f"{path} is stored only as what the program computes from it, which can't be "
                f"undone. Take the float parameters, and {do}."
            )
        base = base.own
    base = _dequantized(base) if is_stored(base) else base
    return _merged(leaf.form, base, leaf.a, leaf.b) if is_adapted(leaf) else base


def adapted(plan: Plan, params: Any, adapters: Mapping[str, Mapping[str, jax.Array]]) -> Any:
    """Return parameters with an ``AdaptedWeight`` for each that has an adapter.

    Weights that are derived from such a parameter are no longer stored beside it, since they depend
    on the adapter.
    """
    check_adapters(plan.lora, adapters)
    given, treedef = by_path(params, plan.prefix, is_stored)
    check_params(plan, given)
    changing = {
        key
        for key, weight in plan.derived.items()
        if weight.derived is not None and not plan.lora.keys().isdisjoint(weight.derived.leaves)
    }
    leaves = []
    for path, leaf in given.items():
        one, held = plan.lora.get(path), _without(leaf, changing)
        pair = adapters[path] if one is not None else {}
        leaves.append(held if one is None else AdaptedWeight(held, pair["a"], pair["b"], one.form))
    return jax.tree.unflatten(treedef, leaves)


def _without(leaf: Any, keys: Set[str]) -> Any:
    """Return a leaf without what is derived from it by these keys."""
    if not isinstance(leaf, Carrier) or keys.isdisjoint(leaf.derived):
        return leaf
    derived = {key: one for key, one in leaf.derived.items() if key not in keys}
    if not derived and leaf.own is not None:
        return leaf.own
    loops = tuple(pair for pair in leaf.loops if pair[0] in derived)
    return dataclasses.replace(leaf, derived=derived, loops=loops)


def _is_kept(node: Any) -> bool:
    return is_adapted(node) or is_stored(node)


def check_params(plan: Plan, given: Mapping[str, Any]) -> None:
    """Raise QuantizationError if a parameter is missing that has an adapter."""
    for path, one in plan.lora.items():
        leaf = given.get(path)
        if getattr(leaf, "shape", None) != one.shape:
            what = "is missing" if leaf is None else (
                f"is {short(leaf)}" if hasattr(leaf, "shape") else f"is {leaf!r:.80}"
            )  # fmt: skip
            raise QuantizationError(
                f"{path} {what}, but the plan has an adapter for it as an array of shape "
                f"{list(one.shape)}. Make the plan for these parameters."
            )


@jax.jit
def _dequantized(leaf: Any) -> jax.Array:
    return leaf.restore()


@functools.partial(jax.jit, static_argnums=0)
def _merged(form: LoraForm, leaf: jax.Array, a: jax.Array, b: jax.Array) -> jax.Array:
    dtype = wide(leaf.dtype, a.dtype, b.dtype)
    a, b = a.astype(dtype), b.astype(dtype)
    return (leaf.astype(dtype) + delta_of(*form.factors(a, b), form.shape) * form.scale).astype(
        leaf.dtype
    )
