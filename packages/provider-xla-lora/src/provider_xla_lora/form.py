"""LoraForm: the shapes of an adapter, its first values, and what it changes."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import quant_numerics as qn
from provider_xla.features import AdapterForm

from .contract import delta_of
from .weight import LoraWeight, wide


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
