"""Quantize float caches, of arguments or model objects, before a program or when it is called."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import jax
from jax.sharding import NamedSharding

from interception_core import Provider
from provider_xla import Bridge, QuantizationError
from provider_xla.features import followed, parameters_of, prefix_of

from .find import is_cache, leaves_of
from .rule import CachePlan

if TYPE_CHECKING:
    from provider_xla import Plan


P = ParamSpec("P")
R = TypeVar("R")


def with_caches(plan: Plan, fn: Callable[..., Any], applied: Callable[P, R]) -> Callable[P, R]:
    """Return a function that quantizes the float caches among its arguments."""
    plans = plan.caches
    if all(one.axis is None for one in plans.values()):
        return applied
    names = parameters_of(fn)

    @functools.wraps(applied)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        leaves = leaves_of(names, args, kwargs)
        values = [_entering(plans.get(leaf.path), leaf.value) for leaf in leaves]
        treedef = jax.tree.structure((args, kwargs), is_leaf=is_cache)
        args, kwargs = jax.tree.unflatten(treedef, values)
        return applied(*args, **kwargs)

    return call


def _entering(plan: CachePlan | None, value: Any) -> Any:
    """Return an argument as the program takes it; refuse caches of other shapes."""
    fits = plan is not None and getattr(value, "shape", None) == plan.shape
    return plan.quantize(value) if fits and value.dtype == plan.dtype else value


def quantize_cache(plan: Plan, value: Any, argument: int | str | None) -> Any:
    """Return an argument with its caches quantized; see ``Plan.quantize_cache``."""
    plans, names = plan.caches, parameters_of(plan.fn)
    carried = {path: one for path, one in plans.items() if one.axis is not None}
    prefix = _prefix(carried or plans, argument, names)
    found, treedef = jax.tree_util.tree_flatten_with_path(value, is_leaf=is_cache)
    paths = [prefix + jax.tree_util.keystr(path) for path, _ in found]
    missing = sorted(path for path in carried if path.startswith(prefix) and path not in paths)
    if missing:
        raise QuantizationError(
            f"value must be {prefix} of the plan's function, got a tree without {missing[0]}. Give "
            "that argument, or say which it is by argument=."
        )
    leaves = [
        _quantized(carried[path], leaf) if path in carried else leaf
        for path, (_, leaf) in zip(paths, found, strict=True)
    ]
    return jax.tree.unflatten(treedef, leaves)


def _prefix(plans: Mapping[str, CachePlan], argument: int | str | None, names: list[str]) -> str:
    if argument is not None:
        return prefix_of(names.index(argument) if argument in names else argument)
    prefixes = sorted({path[: path.index("]") + 1] for path in plans})
    if len(prefixes) != 1:
        shown = ", ".join(prefixes) or "none"
        raise QuantizationError(
            f"The plan must carry caches of one argument, got {shown}. Say which by argument=."
        )
    return prefixes[0]


def _quantized(plan: CachePlan, array: Any) -> Any:
    """Return a cache on the devices of its float array, sharded alike."""
    if is_cache(array):
        return array
    if tuple(array.shape) != plan.shape or array.dtype != plan.dtype:
        raise QuantizationError(
            f"{plan.path} must be {plan.dtype.name}{list(plan.shape)}, got "
            f"{array.dtype.name}{list(array.shape)}. Make a plan for these arguments."
        )
    types = jax.eval_shape(plan.quantize, jax.ShapeDtypeStruct(plan.shape, plan.dtype))
    if isinstance(array, jax.ShapeDtypeStruct):
        return types
    sharding = getattr(array, "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return _made(plan)(array)
    placed = jax.tree.map(lambda part: followed(sharding, types.shape, part.shape), types)
    return jax.jit(plan.quantize, out_shardings=placed)(array)


@functools.lru_cache(maxsize=256)
def _made(plan: CachePlan) -> Callable[..., Any]:
    return jax.jit(plan.quantize)


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
