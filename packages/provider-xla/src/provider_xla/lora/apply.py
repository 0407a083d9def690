"""Running a program with adapters beside its parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import Carrier

from ..errors import QuantizationError
from ..kernels.packed import PrepackedWeight
from ..plan.lora import check_adapters
from ..program.products import Product
from ..program.sites import Site
from ..run.infer import prepared, sites_of, sparse
from ..run.lookup import gather
from ..run.product import quantized_product, stored_operands
from ..run.static import Statistics, calibrations
from ..run.stored import is_stored
from ..run.transformed import TransformedWeight
from .contract import adapter_product
from .lookup import adapter_rows
from .tree import check_params, salt
from .weight import LoraWeight, dropped_out

if TYPE_CHECKING:
    from ..plan.plan import PlanData


def with_adapters(
    plan: PlanData, fn: Callable[..., Any], plain: Callable[..., Any], statistics: Statistics | None
) -> Callable[..., Any]:
    """Returns ``fn`` for a call with adapters, or without.

    Args:
        plan: the plan.
        fn: the function.
        plain: what runs it without adapters.
        statistics: the static ranges of activations.
    """
    if _takes(fn, "adapters") or _takes(fn, "dropout_key"):
        if not plan.lora:
            return plain
        raise QuantizationError(
            f"{fn!r} has an argument named adapters or dropout_key, which are those of a plan "
            "with adapters. Give it another name."
        )
    rules = dataclasses.replace(plan.rules, adapted=frozenset(plan.lora))
    adapted: Callable[..., Any] | None = None

    @functools.wraps(fn)
    def call(*args: Any, adapters: Any = None, dropout_key: Any = None, **kwargs: Any) -> Any:
        nonlocal adapted
        if adapters is None:
            if dropout_key is not None:
                raise QuantizationError(
                    "dropout_key is for adapters, and there are none in this call. Pass "
                    "adapters=, or no dropout_key."
                )
            return plain(*args, **kwargs)
        check_adapters(plan.lora, adapters)
        if adapted is None:
            run = functools.partial(_run_site, rules.adapted, statistics)
            sites = sites_of(plan.engine, rules, run, lookup=_lookup)
            adapted = prepared(plan.engine.wrap(fn, sites.interceptor), stored=True)
        given = list(args)
        if len(given) <= plan.argnum:
            raise QuantizationError(
                f"The parameters are argument {plan.argnum} of {fn!r}: pass them by position."
            )
        given[plan.argnum] = attached(plan, given[plan.argnum], adapters, dropout_key)
        return adapted(*given, **kwargs)

    return call


def attached(
    plan: PlanData, params: Any, adapters: Mapping[str, Mapping[str, jax.Array]], key: Any
) -> Any:
    """Returns the parameters with a LoraWeight for each that has an adapter."""
    found, treedef = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_stored)
    given = {plan.prefix + jax.tree_util.keystr(path): leaf for path, leaf in found}
    check_params(plan, given)
    key = None if key is None else _typed(key)
    leaves = []
    for path, leaf in given.items():
        one, held = plan.lora.get(path), leaf
        if one is not None:
            leaf = leaf.own if isinstance(leaf, Carrier) else leaf
            leaf = qn.unpack(leaf) if isinstance(leaf, qn.PackedQArray) else leaf
            leaf = leaf.unpacked() if isinstance(leaf, TransformedWeight) else leaf
            leaf = leaf if is_stored(leaf) else jnp.asarray(leaf)
            a, b = one.factors(adapters[path]["a"], adapters[path]["b"])
            data, impl = None, None
            if key is not None and one.dropout:
                sizes = [n if axis in one.stepped else 1 for axis, n in enumerate(one.shape)]
                keys = jax.random.split(jax.random.fold_in(key, salt(path)), tuple(sizes))
                data, impl = jax.random.key_data(keys), jax.random.key_impl(key)
            leaf = LoraWeight(leaf, a, b, data, one.scale, one.dropout, impl)
            leaf = dataclasses.replace(held, own=leaf) if isinstance(held, Carrier) else leaf
        leaves.append(leaf)
    return jax.tree.unflatten(treedef, leaves)


def _run_site(adapted_paths: frozenset[str], statistics: Statistics | None, site: Site) -> Any:
    """Return the result of an operation whose parameters may be LoraWeights."""
    stored = [site.call.proxy(operand) for operand in site.operands]
    adapted: dict[int, LoraWeight] = {}
    for side, (held, operand) in enumerate(zip(stored, site.operands, strict=True)):
        if isinstance(held, LoraWeight):
            stored[side] = held.base
            if held.shape == operand.shape:
                adapted[side] = held
    found, how = stored_operands(site, stored)
    operands, hows = list(found), list(how)
    for side, weight in enumerate(site.weights):
        if side in adapted:
            if operands[side] is site.operands[side]:
                operands[side] = adapted[side].base_array()
        elif weight is not None and weight.path in adapted_paths:
            # It got here as an array, with the adapter added: what is quantized is not that.
            hows[side] = None
        if weight is not None and hows[side] is not None:
            operands[side] = sparse(site, side, operands[side])
    if not adapted and not any(hows) and not any(map(is_stored, operands)):
        return NotImplemented
    ranges = calibrations(statistics, site)
    if any(hows) or any(map(is_stored, operands)):
        y = quantized_product(site.product, tuple(hows), *operands, site.extras, ranges)  # type: ignore[arg-type]
    else:
        y = site.product.run(*operands, *site.extras)
    for side, weight in adapted.items():
        # Of two adapted operands the second is multiplied with all of the first.
        other = site.operands[1 - side]
        if side == 0 and 1 in adapted:
            other = adapted[1].base_array()
        number = None if weight.key is None else np.uint32(salt(site.call.op_id))
        delta = _adapter(site.product, side, other, weight, site.extras, number)
        y = y + delta.astype(y.dtype)
    return y


def _lookup(call: Any, operand: Any, indices: Any, **params: Any) -> Any:
    held = call.proxy(operand)
    if not isinstance(held, LoraWeight):
        return NotImplemented
    delta = adapter_rows(held, indices, params)
    base = held.base.unpacked() if isinstance(held.base, PrepackedWeight) else held.base
    if isinstance(base, qn.QArray):
        rows = gather(base, indices, params)
    else:
        rows = call.proceed(base, indices, **params)
    if delta is None or rows is None:
        return NotImplemented
    return rows.astype(operand.dtype) + delta.astype(operand.dtype)


# Jitted so that a model with many equal layers traces it once.
@functools.partial(jax.jit, static_argnums=(0, 1))
def _adapter(
    product: Product,
    side: int,
    x: jax.Array,
    weight: LoraWeight,
    extras: tuple[Any, ...],
    number: Any,
) -> jax.Array:
    """Returns the product of an activation with an adapter, scaled."""
    seen = dropped_out(x, weight, number)
    return adapter_product(product, side, seen, weight.a, weight.b, weight.shape, extras) * (
        weight.scale
    )


def _typed(key: Any) -> jax.Array:
    """Returns a random key of the new style."""
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and key.shape == ():
        return key
    if dtype == jnp.uint32 and getattr(key, "ndim", 0) == 1:
        return jax.random.wrap_key_data(key)
    raise QuantizationError(
        f"dropout_key must be one random key, as of jax.random.key(0). Got {key!r:.80}."
    )


def _takes(fn: Callable[..., Any], name: str) -> bool:
    try:
        return name in inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False
