"""Run a program with adapters beside its parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from hijax_trace import Carrier
from interception_core import Engine

from ..errors import QuantizationError
from ..forms.tree import is_stored, own_form, unpacked_leaf
from ..plan.plan import OF_ADAPTERS, Plan
from ..program.arrays import by_path
from ..program.matching import Rules
from ..program.sites import Sites
from ..run.infer import infer, inference
from ..run.static.statistics import Statistics
from .tree import adapted, salt
from .weight import AdaptedWeight, LoraWeight, is_adapted


class AdaptedRun:
    """Run functions whose parameters may have adapters. Arguments: see ``inference``."""

    def __init__(self, engine: Engine, rules: Rules, *args: Any, **options: Any):
        # Traces are cached by handlers, so these are made once for each set of paths.
        @functools.cache
        def adapting(paths: frozenset[str]) -> Sites:
            adapted = dataclasses.replace(rules, adapted=paths)
            return inference(engine, adapted, *args, **options)

        self._adapting, self._prefix = adapting, rules.params

    def wrap(self, fn: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn`` for parameters of which some are an ``AdaptedWeight``.

        It also takes ``dropout_key``, a random key.
        """
        if _takes_ours(fn):
            raise QuantizationError(
                f"{fn!r} has an argument named adapters or dropout_key, which are those of a plan "
                "with adapters. Give it another name."
            )
        prefix = self._prefix
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
            return infer(self._adapting(paths), fn)(*given, **kwargs)

        return call


def with_adapters(
    plan: Plan, fn: Callable[..., Any], plain: Callable[..., Any], statistics: Statistics | None
) -> Callable[..., Any]:
    """Return ``fn`` for a call with adapters, or without."""
    if not plan.lora and _takes_ours(fn):
        return plain
    running = AdaptedRun(plan.engine, plan.rules, statistics, decided=plan.decided)
    run = running.wrap(fn, plain)

    @functools.wraps(fn)
    def call(*args: Any, adapters: Any = None, **kwargs: Any) -> Any:
        if adapters is None or len(args) <= plan.argnum:
            return run(*args, **kwargs)
        given = list(args)
        given[plan.argnum] = adapted(plan, given[plan.argnum], adapters)
        return run(*given, **kwargs)

    return call


def _loaded(params: Any, prefix: str, key: Any) -> tuple[Any, frozenset[str]]:
    """Return parameters with LoraWeights, and the paths of these."""
    given, treedef = by_path(params, prefix, is_adapted)
    paths = frozenset(path for path, leaf in given.items() if is_adapted(leaf))
    key = None if key is None or not paths else _typed(key)
    leaves = [_travelling(path, leaf, key) if path in paths else leaf
              for path, leaf in given.items()]  # fmt: skip
    return jax.tree.unflatten(treedef, leaves), paths


def _travelling(path: str, weight: AdaptedWeight, key: jax.Array | None) -> Any:
    """Return a parameter with an adapter as it travels through a program."""
    held, form = weight.base, weight.form
    leaf = unpacked_leaf(own_form(held), kernels=True)
    leaf = leaf if is_stored(leaf) else jnp.asarray(leaf)
    a, b = form.factors(weight.a, weight.b)
    data, impl = None, None
    if key is not None and form.dropout:
        sizes = [n if axis in form.stepped else 1 for axis, n in enumerate(form.shape)]
        keys = jax.random.split(jax.random.fold_in(key, salt(path)), tuple(sizes))
        data, impl = jax.random.key_data(keys), jax.random.key_impl(key)
    found = LoraWeight(leaf, a, b, data, form.scale, form.dropout, impl)
    return dataclasses.replace(held, own=found) if isinstance(held, Carrier) else found


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


def _takes_ours(fn: Callable[..., Any]) -> bool:
    try:
        return not OF_ADAPTERS.isdisjoint(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return False
