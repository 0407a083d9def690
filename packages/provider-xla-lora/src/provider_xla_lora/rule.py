"""LoraRule: which parameters get an adapter of a rank. LoraForm: its shapes and first values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import quant_numerics as qn
from provider_xla import QuantizationRule
from provider_xla.features import Adaptable, AdapterForm

from .weight import LoraWeight, delta_of, wide


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraForm(AdapterForm):
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

    kind: ClassVar[str] = "lora"

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
    # pyrefly: ignore [bad-override]
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """The shapes of A and B, as ``"a"`` and ``"b"``."""
        lead, rank = self._sizes(self.lead), self.rank
        return {
            "a": (*lead, *self._sizes(self.contracted), rank),
            "b": (*lead, rank, *self._sizes(self.kept)),
        }

    @property
    # pyrefly: ignore [bad-override]
    def axes(self) -> dict[str, tuple[int | None, ...]]:
        """The axes of the parameter that A and B have."""
        return {
            "a": (*self.lead, *self.contracted, None),
            "b": (*self.lead, None, *self.kept),
        }

    @property
    def label(self) -> str:
        """What plans call it."""
        return f"rank {self.rank}"

    def init(self, key: jax.Array, dtype: Any) -> dict[str, jax.Array]:
        """Return factors of which one is zero.

        A is uniform in ±1/sqrt(fan_in); of a lookup, B is normal.
        """
        shapes = self.shapes
        if self.is_lookup:
            a, b = jnp.zeros(shapes["a"], dtype), jax.random.normal(key, shapes["b"], dtype)
        else:
            bound = math.prod(self._sizes(self.contracted)) ** -0.5
            a = jax.random.uniform(key, shapes["a"], dtype, -bound, bound)
            b = jnp.zeros(shapes["b"], dtype)
        return {"a": a, "b": b}

    def merged(self, w: jax.Array, arrays: Mapping[str, jax.Array]) -> jax.Array:
        """Return ``w + (alpha / rank) * A B``, computed in float32 at least."""
        a, b = arrays["a"], arrays["b"]
        dtype = wide(w.dtype, a.dtype, b.dtype)
        a, b = self.factors(a.astype(dtype), b.astype(dtype))
        return (w.astype(dtype) + delta_of(a, b, self.shape) * self.scale).astype(w.dtype)

    def carried(
        self, base: Any, arrays: Mapping[str, jax.Array], key: jax.Array | None
    ) -> qn.StoredForm:
        """Return the parameter with its factors, and a random key for each step of loops."""
        a, b = self.factors(arrays["a"], arrays["b"])
        data, impl = None, None
        if key is not None and self.dropout:
            sizes = [n if axis in self.stepped else 1 for axis, n in enumerate(self.shape)]
            data = jax.random.key_data(jax.random.split(key, tuple(sizes)))
            impl = jax.random.key_impl(key)
        return LoraWeight(base, a, b, data, self.scale, self.dropout, impl)

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


@dataclasses.dataclass(frozen=True)
class Lora:
    """A float adapter beside each parameter (arXiv:2106.09685), for ``Rule(lora=Lora(8))``.

    Attributes:
        rank: of its factors.
        alpha: the adapter is scaled by ``alpha / rank``; None is ``rank``.
        dropout: share of the activation that it does not see in training.
    """

    rank: int
    alpha: float | None = None
    dropout: float = 0.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoraRule(QuantizationRule):
    """A rule whose parameters get float adapters (LoRA, arXiv:2106.09685).

    With `weight_qtype` it is QLoRA (arXiv:2305.14314). See docs/lora.md.

    Attributes:
        rank: of the adapters.
        alpha: the contraction of the adapters is scaled by ``alpha / rank``. None is `rank`.
        dropout: share of the activation's elements that its adapter doesn't see in training,
            in [0, 1); the others are scaled by ``1 / (1 - dropout)``.

    Raises:
        ValueError: a field has a value that is not allowed; names the field.
    """

    adapts: ClassVar[bool] = True

    rank: int
    alpha: float | None = None
    dropout: float = 0.0

    def __post_init__(self):
        super().__post_init__()
        rank, alpha, dropout = self.rank, self.alpha, self.dropout
        if not isinstance(rank, int) or isinstance(rank, bool) or rank < 1:
            raise ValueError(f"LoraRule.rank must be a positive integer. Got {rank!r}.")
        if alpha is not None and not (_is_number(alpha) and math.isfinite(alpha)):
            raise ValueError(f"LoraRule.alpha must be None or a finite number. Got {alpha!r}.")
        if not _is_number(dropout) or not 0 <= dropout < 1:
            raise ValueError(f"LoraRule.dropout must be a number in [0, 1). Got {dropout!r}.")

    def adapter(self, of: Adaptable) -> LoraForm:
        """Return the adapter of a parameter.

        Raises:
            ValueError: the rank is larger than that of the parameter.
        """
        rank = int(self.rank)
        rows, columns = (math.prod(of.shape[axis] for axis in axes)
                         for axes in (of.contracted, of.kept))  # fmt: skip
        if rank > min(rows, columns):
            raise ValueError(
                f"rank {rank} is larger than that of its matrix of {rows} contracted by "
                f"{columns} kept elements. Choose a rank of at most {min(rows, columns)}, or give "
                "the operation a separate rule."
            )
        alpha = float(rank if self.alpha is None else self.alpha)
        dropout = float(self.dropout)
        return LoraForm(**of._asdict(), rank=rank, alpha=alpha, dropout=dropout)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
