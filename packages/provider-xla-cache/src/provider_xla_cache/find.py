"""Find caches: the arguments that rules name, and how to carry each, tried in traces."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from hijax_trace import MoveError
from interception_core import Engine, Interceptor
from provider_xla.features import Code, Fact, follows_values, parameters_of, prefix_of

from .array import CacheArray, roles_of
from .rule import CachePlan, CacheRule


@dataclasses.dataclass(eq=False)
class Log:
    """What a program did with one cache.

    Attributes:
        contractions: how many contractions took the quantized values.
        is_updated: whether an operation wrote to it.
        lost: for each operation that took the float array, why it did.
        misshared: whether elements share a scale only along batch axes of a contraction, which
            tell apart heads and sequences.
        is_returned: whether it came out in the same form.
    """

    contractions: int = 0
    is_updated: bool = False
    lost: list[str] = dataclasses.field(default_factory=list)
    misshared: bool = False
    is_returned: bool = False

    @property
    def reason(self) -> str | None:
        """Why it must stay float; None if it can be carried quantized."""
        if self.lost:
            return self.lost[0]
        if self.misshared:
            return "its heads or sequences would share scales"
        if not self.contractions:
            return "no contraction takes it"
        if self.is_updated and not self.is_returned:
            return "it is updated, and not returned in the same form"
        return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class TrialArray(CacheArray):
    """A cache that travels with a log of what happens to it.

    Attributes:
        log: the log, which operations write to (static).
    """

    log: Log = dataclasses.field(kw_only=True, metadata={"static": True})

    def moved(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Return what a primitive that only moves elements makes of it."""
        try:
            return super().moved(primitive, params, operands)
        except MoveError as error:
            self.on_dropped(str(error))
            raise

    def updated(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Return the results of a primitive that writes elements."""
        results = super().updated(primitive, params, operands)
        self.log.is_updated = True
        return results

    def computed(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any] | None:
        """Return a contraction of the quantized values, which is scaled outside."""
        results = super().computed(primitive, params, operands)
        if results is None:
            self.on_dropped(f"{primitive} takes the array")
            return None
        side = next(i for i, operand in enumerate(operands) if operand is self)
        sizes = zip(self.shape, self.scale.shape, strict=True)
        shared = {axis for axis, (size, groups) in enumerate(sizes) if groups < size}
        self.log.contractions += 1
        self.log.misshared |= bool(shared) and shared.issubset(
            roles_of(params, side, len(self.shape)).batch
        )
        return results

    def on_dropped(self, reason: str) -> None:
        """Record why the program takes the float array."""
        self.log.lost.append(reason)


def _is_trial(node: Any) -> bool:
    return isinstance(node, TrialArray)


def _let_run(call: Any, *args: Any, **params: Any) -> Any:
    return NotImplemented


def trial(
    engine: Engine,
    fn: Callable[..., Any],
    caches: Mapping[str, CacheArray],
    arrays: Mapping[int, Any],
) -> dict[str, Log]:
    """Return what a program does with its caches, which are types."""
    logs = {path: Log() for path in caches}
    held = {path: TrialArray.of(cache, log=logs[path]) for path, cache in caches.items()}
    tapped = engine.wrap(fn, Interceptor({"primitive:dot_general": _let_run}))
    # Results may hold other things than arrays.
    out: Any = None

    def run(*given: Any) -> None:
        nonlocal out
        out = jax.tree.leaves(tapped(*given), is_leaf=_is_trial)

    jax.eval_shape(run, held, dict(arrays))
    for leaf in out:
        if isinstance(leaf, TrialArray):
            leaf.log.is_returned = True
    return logs


class Leaf(NamedTuple):
    """An array among the arguments of a call.

    Attributes:
        path: its pytree path, which is the same however an argument is passed.
        argument: position of the argument, or its name if it has no position.
        name: name of the argument; None if unknown.
        within: the path within the argument.
        value: the array, or its type.
    """

    path: str
    argument: int | str
    name: str | None
    within: str
    value: Any


def is_cache(node: Any) -> bool:
    """Return whether a node of arguments is a quantized cache."""
    return isinstance(node, CacheArray)


def leaves_of(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Leaf]:
    """Return the leaves of a call's arguments, in the order of ``jax.tree.leaves``."""
    found, _ = jax.tree_util.tree_flatten_with_path((tuple(args), dict(kwargs)), is_leaf=is_cache)
    return [_leaf(names, path, value) for path, value in found]


def _leaf(names: Sequence[str], path: tuple[Any, ...], value: Any) -> Leaf:
    (is_named, key), within = path[:2], jax.tree_util.keystr(path[2:])
    argument: int | str
    name: str | None
    if is_named.idx == 0:
        index: int = key.idx
        argument, name = index, names[index] if index < len(names) else None
    else:
        name = str(key.key)
        argument = names.index(name) if name in names else name
    return Leaf(f"{prefix_of(argument)}{within}", argument, name, within, value)


def find_caches(
    rules: Sequence[CacheRule],
    engine: Engine,
    params: int,
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
) -> tuple[dict[str, CachePlan], list[Fact]]:
    """Return how each named argument is carried, and where rules can't be followed."""
    leaves = leaves_of(parameters_of(fn), args, kwargs)
    found = ((leaf.path, _rule(rules, leaf, params)) for leaf in leaves)
    matched = {path: rule for path, rule in found if rule is not None}
    used = set(matched.values())
    faults = [Code.NO_CACHE(cache_rule=rule) for rule in rules if rule not in used]
    values = {leaf.path: leaf.value for leaf in leaves if leaf.path in matched}
    if not values:
        return {}, faults
    if not follows_values(engine):
        why = "the patch engine can't hand it to what updates it. Use engine='trace'"
        plans = {
            path: CachePlan(
                path, tuple(x.shape), np.dtype(x.dtype), matched[path].qtype, reason=why
            )
            for path, x in values.items()
        }
        return plans, [*faults, *(Code.CACHE_FLOAT(cache=plan) for plan in plans.values())]
    search = _Search(engine, fn, args, kwargs, leaves)
    plans = search.run({path: _candidates(path, values[path], matched[path]) for path in values})
    left = (plan for plan in plans.values() if plan.reason is not None)
    return plans, [*faults, *(Code.CACHE_FLOAT(cache=plan) for plan in left)]


def _rule(rules: Sequence[CacheRule], leaf: Leaf, params: int) -> CacheRule | None:
    value = leaf.value
    if not hasattr(value, "shape") or not hasattr(value, "dtype") or len(value.shape) < 2:
        return None
    if not jnp.issubdtype(value.dtype, jnp.floating):
        return None
    where = (leaf.argument, leaf.name, leaf.within, params)
    return next((one for one in rules if one.matches(*where)), None)


def _candidates(path: str, value: Any, rule: CacheRule) -> Iterator[CachePlan]:
    """Yield the ways to carry an array, the likeliest (last axis) first.

    The last way is to leave it float.
    """
    shape, dtype = tuple(value.shape), np.dtype(value.dtype)
    for axis in reversed(range(len(shape))):
        tile = rule.tile_size
        if shape[axis] < 2 or (tile is not None and shape[axis] % tile):
            continue
        tile = None if tile == shape[axis] else tile
        yield CachePlan(path, shape, dtype, rule.qtype, axis, tile)
    reason = f"no axis of two elements or more has tiles of {rule.tile_size}"
    yield CachePlan(path, shape, dtype, rule.qtype, reason=reason)


def _type_of(array: Any) -> jax.ShapeDtypeStruct:
    """Return an array's type, with its sharding where axes are explicit."""
    sharding = getattr(array, "sharding", None)
    kinds = sharding.mesh.axis_types if isinstance(sharding, NamedSharding) else ()
    known = sharding if AxisType.Explicit in kinds else None
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=known)


class _Search:
    """Try the ways to carry each cache in turn, all caches together."""

    def __init__(
        self,
        engine: Engine,
        fn: Callable[..., Any],
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        leaves: Sequence[Leaf],
    ):
        self._engine = engine
        self._fn = fn
        given = (tuple(args), dict(kwargs))
        self._flat, self._treedef = jax.tree.flatten(given, is_leaf=is_cache)
        self._paths = [leaf.path for leaf in leaves]

    def run(self, ways: Mapping[str, Iterator[CachePlan]]) -> dict[str, CachePlan]:
        """Return a plan for each cache."""
        found: dict[str, CachePlan] = {}
        why: dict[str, str] = {}
        trying = {path: next(way) for path, way in ways.items()}
        while trying:
            found |= {path: plan for path, plan in trying.items() if plan.axis is None}
            trying = {path: plan for path, plan in trying.items() if plan.axis is not None}
            logs = self._try(trying) if trying else {}
            failed = [path for path in trying if logs[path].reason is not None]
            if not failed:
                break
            for path in failed:
                # Report what is wrong with the likeliest way.
                why.setdefault(path, logs[path].reason)
                trying[path] = next(ways[path])
                if trying[path].axis is None:
                    trying[path] = dataclasses.replace(trying[path], reason=why[path])
        for path, plan in trying.items():
            counts = {name: getattr(logs[path], name) for name in ("contractions", "is_updated")}
            found[path] = dataclasses.replace(plan, **counts)
        return {path: found[path] for path in ways}

    def _try(self, plans: Mapping[str, CachePlan]) -> Mapping[str, Any]:
        types = dict(zip(self._paths, self._flat, strict=True))
        caches = {
            path: jax.eval_shape(plan.quantize, _type_of(types[path]))
            for path, plan in plans.items()
        }
        # A leaf that is not an array is a constant.
        arrays = {
            i: _type_of(x)
            for i, x in enumerate(self._flat)
            if hasattr(x, "shape") and hasattr(x, "dtype") and self._paths[i] not in plans
        }

        def program(caches: Mapping[str, Any], arrays: Mapping[int, Any]) -> Any:
            flat = [
                caches.get(path, arrays.get(i, value))
                for i, (path, value) in enumerate(zip(self._paths, self._flat, strict=True))
            ]
            args, kwargs = jax.tree.unflatten(self._treedef, flat)
            return self._fn(*args, **kwargs)

        return trial(self._engine, program, caches, arrays)
