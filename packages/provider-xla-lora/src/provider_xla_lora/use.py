"""Adapters of a plan: made, put at their parameters, and run beside them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Set
from typing import Any

import jax
import jax.numpy as jnp

from hijax_trace import Carrier
from interception_core import Engine
from provider_xla import AdaptedWeight, AdapterPlan, Plan, QuantizationError
from provider_xla.features import (
    NO_ADAPTERS,
    OF_ADAPTERS,
    Rules,
    Statistics,
    by_path,
    infer,
    inference,
    is_adapted,
    is_stored,
    own_form,
    short,
    takes_any,
)

from .weight import salt

Run = Callable[..., Any]


def init_adapters(plan: Plan, key: jax.Array, dtype: Any = None) -> dict[str, dict[str, jax.Array]]:
    """Make adapters that change nothing yet: see ``Plan.init_adapters``."""
    if not plan.adapters:
        raise QuantizationError(NO_ADAPTERS)
    dtype = jnp.dtype(jnp.float32 if dtype is None else dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise QuantizationError(
            f"Adapters are floats, of which gradients can be taken. Got dtype {dtype.name}."
        )
    return {path: one.form.init(_key_of(key, path), dtype) for path, one in plan.adapters.items()}


def put_adapters(plan: Plan, params: Any, adapters: Mapping[str, Mapping[str, jax.Array]]) -> Any:
    """Return parameters with an ``AdaptedWeight`` for each that has an adapter.

    Weights that are derived from such a parameter are no longer stored beside it, since they depend
    on the adapter.

    Raises:
        QuantizationError: the adapters have other paths or shapes than the plan's, or a parameter
            that has one is missing.
    """
    _check_adapters(plan.adapters, adapters)
    given, treedef = by_path(params, plan.prefix, is_stored)
    _check_params(plan, given)
    changing = {
        key
        for key, weight in plan.derived.items()
        if weight.derived is not None and not plan.adapters.keys().isdisjoint(weight.derived.leaves)
    }
    leaves = []
    for path, leaf in given.items():
        one, held = plan.adapters.get(path), _without(leaf, changing)
        if one is not None:
            arrays = {name: adapters[path][name] for name in one.shapes}
            held = AdaptedWeight(held, arrays, one.form)
        leaves.append(held)
    return jax.tree.unflatten(treedef, leaves)


def apply_adapters(plan: Plan, fn: Run, plain: Run, statistics: Statistics | None) -> Run:
    """Return a plan's ``fn`` for calls with adapters, or without; ``plain`` runs it without."""
    running = run_adapters(plan.engine, plan.rules, statistics, decided=plan.decided)
    run = running(fn, plain)

    @functools.wraps(fn)
    def call(*args: Any, adapters: Any = None, **kwargs: Any) -> Any:
        if adapters is None or len(args) <= plan.argnum:
            return run(*args, **kwargs)
        given = list(args)
        given[plan.argnum] = put_adapters(plan, given[plan.argnum], adapters)
        return run(*given, **kwargs)

    return call


def run_adapters(engine: Engine, rules: Rules, *args: Any, **options: Any) -> Callable[..., Run]:
    """Return what makes functions whose parameters may have adapters.

    It takes the function, and the same for parameters without. The result also takes
    ``dropout_key``, a random key. Arguments: see ``provider_xla.features.inference``.
    """

    # Traces are cached by handlers, so these are made once for each set of paths.
    @functools.cache
    def adapting(paths: frozenset[str]) -> Any:
        adapted = dataclasses.replace(rules, adapted=paths)
        return inference(engine, adapted, *args, **options)

    return functools.partial(_wrapped, adapting, rules.params)


def _wrapped(adapting: Callable[..., Any], prefix: str, fn: Run, plain: Run) -> Run:
    if takes_any(fn, OF_ADAPTERS):
        raise QuantizationError(
            f"{fn!r} has an argument named adapters or dropout_key, which are those of a plan "
            "with adapters. Give it another name."
        )
    argnum = int(prefix.removeprefix("args[").removesuffix("]"))

    @functools.wraps(fn)
    def call(*args: Any, dropout_key: Any = None, **kwargs: Any) -> Any:
        given = list(args)
        if len(given) <= argnum:
            raise QuantizationError(
                f"The parameters are argument {argnum} of {fn!r}: pass them by position."
            )
        given[argnum], paths = _loaded(given[argnum], prefix, dropout_key)
        if not paths:
            if dropout_key is not None:
                raise QuantizationError(
                    "dropout_key is for adapters, and there are none in this call. Pass "
                    "parameters with adapters, or no dropout_key."
                )
            return plain(*args, **kwargs)
        return infer(adapting(paths), fn)(*given, **kwargs)

    return call


def _loaded(params: Any, prefix: str, key: Any) -> tuple[Any, frozenset[str]]:
    """Return parameters with adapters as they travel, and the paths of these."""
    given, treedef = by_path(params, prefix, is_adapted)
    paths = frozenset(path for path, leaf in given.items() if is_adapted(leaf))
    key = None if key is None or not paths else _typed(key)
    leaves = [_carried(path, leaf, key) if path in paths else leaf
              for path, leaf in given.items()]  # fmt: skip
    return jax.tree.unflatten(treedef, leaves), paths


def _carried(path: str, weight: AdaptedWeight, key: jax.Array | None) -> Any:
    """Return a parameter with an adapter as it travels through a program."""
    held, leaf = weight.base, own_form(weight.base)
    leaf = leaf if is_stored(leaf) else jnp.asarray(leaf)
    found = weight.form.carried(leaf, weight.arrays, None if key is None else _key_of(key, path))
    return dataclasses.replace(held, own=found) if isinstance(held, Carrier) else found


def _key_of(key: jax.Array, path: str) -> jax.Array:
    """Return the random key of a parameter, the same in every process."""
    return jax.random.fold_in(key, salt(path))


def _typed(key: Any) -> jax.Array:
    """Return a random key of the new style."""
    dtype = getattr(key, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key) and key.shape == ():
        return key
    if dtype == jnp.uint32 and getattr(key, "ndim", 0) == 1:
        return jax.random.wrap_key_data(key)
    raise QuantizationError(
        f"dropout_key must be one random key, as of jax.random.key(0). Got {key!r:.80}."
    )


def _without(leaf: Any, keys: Set[str]) -> Any:
    """Return a leaf without what is derived from it by these keys."""
    if not isinstance(leaf, Carrier) or keys.isdisjoint(leaf.derived):
        return leaf
    derived = {key: one for key, one in leaf.derived.items() if key not in keys}
    if not derived and leaf.own is not None:
        return leaf.own
    loops = tuple(pair for pair in leaf.loops if pair[0] in derived)
    return dataclasses.replace(leaf, derived=derived, loops=loops)


def _check_params(plan: Plan, given: Mapping[str, Any]) -> None:
    """Raise QuantizationError if a parameter is missing that has an adapter."""
    for path, one in plan.adapters.items():
        leaf, shape = given.get(path), one.form.shape
        if getattr(leaf, "shape", None) != shape:
            what = "is missing" if leaf is None else (
                f"is {short(leaf)}" if hasattr(leaf, "shape") else f"is {leaf!r:.80}"
            )  # fmt: skip
            raise QuantizationError(
                f"{path} {what}, but the plan has an adapter for it as an array of shape "
                f"{list(shape)}. Make the plan for these parameters."
            )


def _check_adapters(plans: Mapping[str, AdapterPlan], adapters: Any) -> None:
    """Raise QuantizationError unless adapters match the plan's paths and shapes."""
    if not plans:
        raise QuantizationError(NO_ADAPTERS)
    if not isinstance(adapters, Mapping):
        raise QuantizationError(
            "adapters must be a dict by the paths of parameters, as plan.init_adapters(key) "
            f"returns it. Got {type(adapters).__name__}."
        )
    for path in sorted(plans.keys() ^ adapters.keys(), key=str):
        which = "the plan has and the adapters have not" if path in plans else (
            "the adapters have and the plan has not"
        )  # fmt: skip
        raise QuantizationError(
            f"The adapters are for another plan: {path} is a parameter that {which}. Make them "
            "with this plan's init_adapters, or make the plan by the rules that they are from."
        )
    for path, plan in plans.items():
        given = adapters[path]
        if not isinstance(given, Mapping) or given.keys() != plan.shapes.keys():
            names = " and ".join(map(repr, plan.shapes))
            raise QuantizationError(
                f"The adapter of {path} must be a dict of arrays {names}, as "
                f"plan.init_adapters(key) returns it. Got {given!r:.80}."
            )
        for name, expected in plan.shapes.items():
            array = given[name]
            shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
            if shape != expected or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                found = type(array).__name__ if shape is None or dtype is None else short(array)
                raise QuantizationError(
                    f"The adapter of {path} (rule {plan.rule}, {plan.form.label}) has {found} as "
                    f"'{name}', but the plan needs floats of shape {list(expected)}. Make it with "
                    "this plan's init_adapters."
                )
