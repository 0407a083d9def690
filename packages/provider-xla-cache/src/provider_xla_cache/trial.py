"""Trial: trace a program with caches that record how they are used."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from hijax_trace import MoveError
from interception_core import Engine, Interceptor

from .array import CacheArray
from .contract import roles_of


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
    held = {
        path: TrialArray(
            **{one.name: getattr(cache, one.name) for one in dataclasses.fields(cache)},
            log=logs[path],
        )
        for path, cache in caches.items()
    }
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
