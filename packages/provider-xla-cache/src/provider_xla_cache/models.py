"""Caches of model objects: planned as an argument, stored quantized."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from interception_core import Provider
from provider_xla import Bridge, QuantizationError
from provider_xla.features import prefix_of

NAMES = ("cache", "state")
"""Names for the argument that holds a model's caches: the first that the method doesn't use."""


def planned_function(
    bridge: Bridge, model: Any, method: str, provider: Provider, given: Collection[str]
) -> tuple[Callable[..., Any], Mapping[str, Any]]:
    """Return a method as a plan takes it, with its extra arguments.

    The caches that the model holds become an argument, and the updated ones a result. The other
    arguments have the method's names.

    Raises:
        QuantizationError: a rule for caches names the parameters.
    """
    fn, rules = bridge.function(model, method), getattr(provider, "cache_rules", ())
    wrong = next((rule for rule in rules if rule.argument == 0), None)
    if wrong is not None:
        raise QuantizationError(
            "A CacheRule of a model object must name an argument of its method, or 'cache' for the "
            f"caches that the model holds, got {wrong!r}. Write CacheRule('cache')."
        )
    signature = _signature(getattr(model, method))
    own = bridge.caches(model)
    if own is None:
        return _Method(fn, None, signature), {}
    name = next(one for one in NAMES if one not in {*given, *signature.parameters})
    return _Method(bridge.step(model, method), name, signature), {name: own}


@dataclasses.dataclass(eq=False)
class _Method:
    """A method with the names of its arguments. It can be pickled.

    Attributes:
        run: the method as a function of parameters, and of caches where there is a name for them.
        caches: the name of the argument that holds caches, or None.
    """

    run: Callable[..., Any]
    caches: str | None
    __signature__: inspect.Signature

    def __call__(self, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        first = () if self.caches is None else (kwargs.pop(self.caches),)
        return self.run(parameters, *first, *args, **kwargs)


def put_caches(bridge: Bridge, model: Any, plan: Any, held: Mapping[str, Any]) -> Any:
    """Return a rebuilt model with the caches quantized that the plan carries."""
    for name, caches in held.items():
        carried = [one for one in plan.caches.values() if one.axis is not None]
        if any(one.path.startswith(prefix_of(name)) for one in carried):
            model = bridge.with_caches(model, plan.quantize_cache(caches, name))
    return model


def _signature(method: Callable[..., Any]) -> inspect.Signature:
    """Return the signature of a method as a function of parameters."""
    kind = inspect.Parameter.POSITIONAL_ONLY
    try:
        found = [*inspect.signature(method).parameters.values()]
    except (TypeError, ValueError):
        found = []
    taken = {one.name for one in found}
    first = next(name for name in ("parameters", "parameters_") if name not in taken)
    return inspect.Signature([inspect.Parameter(first, kind), *found])
