"""Plan, measure and train: functions of parameters, and model objects of any framework."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from interception_core import (
    Provider,
    ProviderSpec,
    UnknownNameError,
    declared_specs,
    find_bridge,
    get_provider,
)

from ._needs import needed

__all__ = ["get_provider", "plan", "providers", "report", "train"]

xla: Any = needed("provider_xla", "xla", "jaxtap")
_check_has: Any = needed("provider_xla.cli", "xla", "jaxtap").check_has


def plan(
    fn: Any,
    *args: Any,
    rules: Any = "w8a8",
    params_argnum: int = 0,
    engine: str | None = None,
    strict: bool = False,
    **kwargs: Any,
) -> Any:
    """Find what rules do to a function or a model object, without running or copying anything.

    Args:
        fn: a function of parameters and other arguments; or a model object of Flax, Equinox or
            another framework with a bridge, which holds its parameters.
        args: the parameters, then the other arguments; or the inputs of the model: arrays or
            ``jax.ShapeDtypeStruct``.
        rules: the name of a preset (``print(jaxtap.presets())`` shows all), a ``Rule``, or several;
            or a provider, which has the options below itself.
        params_argnum: which argument of a function holds the parameters.
        engine: "trace" or "patch"; None for the best.
        strict: whether a rule that can't be followed is an error instead of a warning.
        kwargs: keyword arguments of the function or the model.

    Returns:
        The plan: ``print`` it. ``plan.quantize(params)`` stores the parameters, ``plan.apply()``
        is the function for these.

    Raises:
        QuantizationError: a rule does not fit a parameter; see ``provider_xla.XlaProvider.plan``.
    """
    if not args:
        raise TypeError(
            "jaxtap.plan takes a function, its parameters and its other arguments, or a model and "
            f"its inputs, got a {type(fn).__name__} alone. Types (jax.ShapeDtypeStruct) are enough."
        )
    if isinstance(rules, Provider):
        if (params_argnum, engine, strict) != (0, None, False):
            raise TypeError(
                "params_argnum, engine and strict must be given to the provider, got them beside "
                f"a {type(rules).__name__}. Leave them out."
            )
        provider: Any = rules
    else:
        options = {"params_argnum": params_argnum, "engine": engine, "strict": strict}
        provider = xla.PtqProvider(rules, **options)
    if not hasattr(provider, "plan"):
        raise TypeError(
            f"rules must be rules, or a provider that makes plans, got a {type(rules).__name__}, "
            "which has no method plan. jaxtap.providers() lists the others."
        )
    if _bridge(fn) is None:
        return provider.plan(fn, *args, **kwargs)
    return xla.plan_model(fn, provider, *args, **kwargs)


class Providers(tuple[ProviderSpec, ...]):
    """The providers that are installed. ``print`` shows a table."""

    __slots__ = ()

    def __str__(self) -> str:
        width = max((len(one.name) for one in self), default=0)
        return "\n".join(f"{one.name:{width}}  {one.summary}" for one in self)


def providers() -> Providers:
    """Return the providers that are installed, by name.

    ``get_provider(name, **options)`` makes one, for ``plan(..., rules=provider)``,
    ``quantize_model(model, provider, x)`` and ``jaxtap plan --provider NAME``.
    """
    return Providers(sorted(declared_specs(ProviderSpec), key=lambda one: one.name))


def _bridge(fn: Any) -> Any:
    """Return the bridge of a model object; None for a function."""
    try:
        return find_bridge(fn)
    except UnknownNameError:
        return None


def report(fn: Any, *args: Any, rules: Any = "w8a8", **kwargs: Any) -> Any:
    """Measure what rules cost a function or a model on data: errors, bytes and times.

    Args:
        fn: as for ``plan``.
        args: as for ``plan``, with values.
        rules: as for ``plan``.
        kwargs: as for ``plan``; keyword arguments of a function are constants.

    Returns:
        The report: ``print`` it, or ``save_html`` it.
    """
    options = {name: kwargs.pop(name) for name in _OPTIONS if name in kwargs}
    bridge = _bridge(fn)
    if kwargs:
        if bridge is not None:
            raise TypeError(f"jaxtap.report calls a model by position, got {', '.join(kwargs)}=.")
        fn = functools.partial(fn, **kwargs)
    made = plan(fn, *args, rules=rules, **options)
    _check_has(made, "report", "jaxtap.report")
    return made.report(*args) if bridge is None else made.report(bridge.parameters(fn), *args)


_OPTIONS = ("params_argnum", "engine", "strict")
"""Keyword arguments of ``plan`` that are not the function's."""


def train(
    fn: Callable[..., Any],
    rules: Any = "train-int8",
    *,
    gradient: Any = None,
    params_argnum: int = 0,
) -> Callable[..., Any]:
    """Return a loss function whose matmuls and their gradients are quantized.

    Args:
        fn: takes float parameters; differentiate the result by them, under ``jax.jit``.
        rules: as for ``plan``: presets for training begin with "train" and "qat".
        gradient: the format of incoming gradients instead of the rules': a qtype or a ``Gradient``.
        params_argnum: which argument holds the parameters.
    """
    found = xla.QtProvider(rules, params_argnum=params_argnum)
    if gradient is not None:
        own = [xla.with_gradient(one, gradient) if one.is_acting else one for one in found.rules]
        found = xla.QtProvider(own, params_argnum=params_argnum)
    return found.apply(fn)
