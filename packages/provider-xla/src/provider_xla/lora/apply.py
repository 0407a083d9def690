"""Run a program with adapters beside its parameters."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import Carrier, repeated
from interception_core import Engine, Interceptor
from quant_numerics import Contraction

from ..errors import QuantizationError
from ..kernels.packed import PrepackedWeight
from ..program.arrays import by_path
from ..program.matching import Rules
from ..program.sites import Record, Site, Sites, ignore
from ..run.contraction import quantized_contraction, stored_operands
from ..run.infer import sparse, taking_stored
from ..run.lookup import gather
from ..run.static.statistics import Statistics, calibrations
from ..run.stored import is_stored, unpacked_leaf
from .contract import adapter_contraction
from .lookup import adapter_rows
from .tree import adapted, salt
from .weight import AdaptedWeight, LoraWeight, dropped_out, is_adapted

if TYPE_CHECKING:
    from ..plan.plan import PlanData


ARGUMENTS = frozenset({"adapters", "dropout_key"})
"""Further arguments of a function whose parameters may have adapters."""


class AdaptedRun:
    """Run functions whose parameters may have adapters.

    Args:
        engine: taps the operations.
        rules: decide them.
        statistics: the static ranges of activations.
        record: called for every operation seen.
    """

    def __init__(
        self,
        engine: Engine,
        rules: Rules,
        statistics: Statistics | None = None,
        record: Record = ignore,
    ):
        self._engine = engine
        self._rules = rules
        self._statistics = statistics
        self._record = record
        # By the paths of the parameters that have an adapter. Traces are cached by interceptor, so
        # one is made for each set of paths, and used again.
        self._interceptors: dict[frozenset[str], Interceptor] = {}

    def wrap(self, fn: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return ``fn`` for parameters of which some are an ``AdaptedWeight``.

        It also takes ``dropout_key``, a random key.

        Args:
            fn: the function.
            plain: what runs it where no parameter has an adapter.
        """
        if _takes_ours(fn):
            raise QuantizationError(
                f"{fn!r} has an argument named adapters or dropout_key, which are those of a plan "
                "with adapters. Give it another name."
            )
        prefix = self._rules.params
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
            tapped = self._engine.wrap(fn, self._interceptor(paths))
            return taking_stored(tapped, follows=True)(*given, **kwargs)

        return call

    def _interceptor(self, paths: frozenset[str]) -> Interceptor:
        if paths not in self._interceptors:
            rules = dataclasses.replace(self._rules, adapted=paths)
            run = functools.partial(_run_site, paths, self._statistics)
            sites = Sites(self._engine, rules, run, self._record, lookup=_lookup)
            self._interceptors[paths] = sites.interceptor
        return self._interceptors[paths]


def with_adapters(
    plan: PlanData, fn: Callable[..., Any], plain: Callable[..., Any], statistics: Statistics | None
) -> Callable[..., Any]:
    """Return ``fn`` for a call with adapters, or without.

    Args:
        plan: the plan.
        fn: the function.
        plain: what runs it without adapters.
        statistics: the static ranges of activations.
    """
    if not plan.lora and _takes_ours(fn):
        return plain
    run = AdaptedRun(plan.engine, plan.rules, statistics).wrap(fn, plain)

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
    leaf = unpacked_leaf(held.own if isinstance(held, Carrier) else held, kernels=True)
    leaf = leaf if is_stored(leaf) else jnp.asarray(leaf)
    a, b = form.factors(weight.a, weight.b)
    data, impl = None, None
    if key is not None and form.dropout:
        sizes = [n if axis in form.stepped else 1 for axis, n in enumerate(form.shape)]
        keys = jax.random.split(jax.random.fold_in(key, salt(path)), tuple(sizes))
        data, impl = jax.random.key_data(keys), jax.random.key_impl(key)
    found = LoraWeight(leaf, a, b, data, form.scale, form.dropout, impl)
    return dataclasses.replace(held, own=found) if isinstance(held, Carrier) else found


def _run_site(adapted_paths: frozenset[str], statistics: Statistics | None, site: Site) -> Any:
    """Return the result of an operation whose parameters may be LoraWeights."""
    stored = [site.call.proxy(operand) for operand in site.operands]
    among: dict[int, LoraWeight] = {}
    for side, (held, operand) in enumerate(zip(stored, site.operands, strict=True)):
        if isinstance(held, LoraWeight):
            stored[side] = held.base
            if held.shape == operand.shape:
                among[side] = held
    found, how = stored_operands(site, stored)
    operands, hows = list(found), list(how)
    for side, weight in enumerate(site.weights):
        if side in among:
            if operands[side] is site.operands[side]:
                operands[side] = among[side].base_array()
        elif weight is not None and not adapted_paths.isdisjoint(weight.paths):
            # The weight came as an array with the adapter added, which must not be quantized.
            hows[side] = None
        if weight is not None and hows[side] is not None:
            operands[side] = sparse(site, side, operands[side])
    if not among and not any(hows) and not any(map(is_stored, operands)):
        return NotImplemented
    ranges = calibrations(statistics, site)
    if any(hows) or any(map(is_stored, operands)):
        static = site.contraction, tuple(hows)
        y = repeated(quantized_contraction, static, *operands, site.extras, ranges)
    else:
        y = site.contraction.run(*operands, *site.extras)
    for side, weight in among.items():
        # If both operands W and V have adapters D and E, the sum is W V + D V + (W + D) E.
        other = site.operands[1 - side]
        if side == 0 and 1 in among:
            other = among[1].base_array()
        number = None if weight.key is None else np.uint32(salt(site.call.op_id))
        delta = _adapter(site.contraction, side, other, weight, site.extras, number)
        y = y + delta.astype(y.dtype)
    return y


def _lookup(call: Any, operand: Any, indices: Any, *starts: Any, **params: Any) -> Any:
    held = call.proxy(operand)
    # A slice takes the factors' rows as it takes those of the parameter.
    if not isinstance(held, LoraWeight) or call.op_name != "gather":
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
    contraction: Contraction,
    side: int,
    x: jax.Array,
    weight: LoraWeight,
    extras: tuple[Any, ...],
    number: Any,
) -> jax.Array:
    """Return the contraction of an activation with an adapter, scaled."""
    seen = dropped_out(x, weight, number)
    return adapter_contraction(
        contraction, side, seen, weight.a, weight.b, weight.shape, extras
    ) * (weight.scale)


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
        return not ARGUMENTS.isdisjoint(inspect.signature(fn).parameters)
    except (TypeError, ValueError):
        return False
