"""Which parameters get an adapter, and what shape it has."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..errors import QuantizationError
from ..program.matching import follows_values
from ..program.sites import short


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraForm:
    """The form of an adapter: ``W + (alpha / rank) * A B``.

    Equal parameters have equal forms, wherever they are. A is [*lead, *contracted, rank] and B
    [*lead, rank, *kept], each with the parameter's axes in their order.

    Attributes:
        shape: of the parameter.
        rank: of the adapter.
        alpha: the adapter's contraction is scaled by ``alpha / rank``.
        dropout: share of the activation that the adapter doesn't see in training, in [0, 1).
        lead: axes of the parameter that A and B both have: steps of a scan, groups, batch axes.
        contracted: axes of the parameter that A has: those that its first contraction sums over,
            or that a lookup indexes.
        kept: axes of the parameter that B has: the others.
        stepped: those of ``lead`` that loops step along.
        is_lookup: whether the parameter is only looked up.
    """

    shape: tuple[int, ...]
    rank: int
    alpha: float
    dropout: float
    lead: tuple[int, ...]
    contracted: tuple[int, ...]
    kept: tuple[int, ...]
    stepped: tuple[int, ...]
    is_lookup: bool

    @property
    def scale(self) -> float:
        """``alpha / rank``."""
        return self.alpha / self.rank

    @property
    def a_shape(self) -> tuple[int, ...]:
        """Shape of A."""
        return (*self._sizes(self.lead), *self._sizes(self.contracted), self.rank)

    @property
    def b_shape(self) -> tuple[int, ...]:
        """Shape of B."""
        return (*self._sizes(self.lead), self.rank, *self._sizes(self.kept))

    @property
    def size(self) -> int:
        """Return the number of elements in A and B together."""
        return math.prod(self.a_shape) + math.prod(self.b_shape)

    @property
    def fan_in(self) -> int:
        """Return the number of elements that a column of A sums."""
        return math.prod(self._sizes(self.contracted))

    def factors(self, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Return A and B with the parameter's axes, then the rank."""
        b = jnp.moveaxis(b, len(self.lead), -1)
        return self._spread(a, self.contracted), self._spread(b, self.kept)

    def _sizes(self, axes: Sequence[int]) -> tuple[int, ...]:
        return tuple(self.shape[axis] for axis in axes)

    def _spread(self, factor: jax.Array, own: Sequence[int]) -> jax.Array:
        axes = (*self.lead, *own)
        order = sorted(range(len(axes)), key=axes.__getitem__)
        sizes = [n if axis in axes else 1 for axis, n in enumerate(self.shape)]
        return factor.transpose(*order, len(axes)).reshape(*sizes, self.rank)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraPlan(LoraForm):
    """The adapter of one parameter, wherever the program uses it.

    Attributes:
        path: pytree path of the parameter.
        dtype: its dtype.
        rule: the number of the rule.
        ops: the ids of the operations whose rule asked for it.
    """

    path: str
    dtype: np.dtype
    rule: int
    ops: tuple[str, ...]

    @property
    def form(self) -> LoraForm:
        """Return the form alone, which other parameters may share."""
        fields = dataclasses.fields(LoraForm)
        return LoraForm(**{field.name: getattr(self, field.name) for field in fields})

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        values = dataclasses.asdict(self)
        values |= {"dtype": self.dtype.name, "a_shape": self.a_shape, "b_shape": self.b_shape}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}


def check_engine(engine: Any, paths: Sequence[str]) -> None:
    """Raise QuantizationError where adapters can't travel with their parameters."""
    if paths and not follows_values(engine):
        raise QuantizationError(
            f"Rules give {paths[0]} an adapter, which the patch engine can't hand to the "
            "operations that use it. Use PtqProvider(rules, engine='trace')."
        )


def check_adapters(plans: Mapping[str, LoraPlan], adapters: Any) -> None:
    """Raise QuantizationError unless adapters match the plan's paths and shapes."""
    if not plans:
        raise QuantizationError(
            "This plan has no adapters: no rule with a rank decides an operation of a parameter. "
            "Give a rule one, as QuantizationRule(weight_qtype='nf4', rank=8)."
        )
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
        pair = adapters[path]
        if not isinstance(pair, Mapping) or set(pair) != {"a", "b"}:
            raise QuantizationError(
                f"The adapter of {path} must be a dict of arrays 'a' and 'b', as "
                f"plan.init_adapters(key) returns it. Got {pair!r:.80}."
            )
        for name, expected in (("a", plan.a_shape), ("b", plan.b_shape)):
            array = pair[name]
            shape, dtype = getattr(array, "shape", None), getattr(array, "dtype", None)
            if shape != expected or dtype is None or not jnp.issubdtype(dtype, jnp.floating):
                given = type(array).__name__ if shape is None or dtype is None else short(array)
                raise QuantizationError(
                    f"The adapter of {path} (rule {plan.rule}, rank {plan.rank}) has {given} as "
                    f"'{name}', but the plan needs floats of shape {list(expected)}. Make it with "
                    "this plan's init_adapters."
                )
