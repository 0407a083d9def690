"""Carrier: an input of a program, with values that the program computes from it, kept elsewhere."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .array_proxy import ArrayProxy, Lost


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Carrier(ArrayProxy):
    """An input, and array proxies of values that the program derives from it.

    The proxies travel with the input and with what is computed from it, into loops and calls.
    Where the program computes a value whose ``Expression.key`` is that of a proxy, the proxy
    stands for it from there on, as if it had been an input.

    Attributes:
        own: the input itself: an array, an array proxy, or None if nothing of it is needed.
        derived: the proxies, by the key of the expression that each stands for. One of a value
            that is computed in loops has the steps of these in its first axes, the outermost
            loop first: see ``Expression.evaluate``.
        loops: the numbers of those axes, by key (static).
        is_parameter: whether the input of a pytree path is a parameter (static): what is computed
            from anything else is no longer accompanied. Hashable.
        shape: of the input (static).
        dtype: of the input (static).
    """

    own: Any
    derived: Mapping[str, ArrayProxy]
    loops: tuple[tuple[str, int], ...] = dataclasses.field(metadata={"static": True})
    is_parameter: Callable[[str], bool] = dataclasses.field(metadata={"static": True})
    # pyrefly: ignore [bad-override]
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    # pyrefly: ignore [bad-override]
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    def restore(self) -> jax.Array:
        """Return the input; NaN where nothing of it is kept, so that no use of it goes unseen."""
        if self.own is None:
            return jnp.full(self.shape, jnp.nan, self.dtype)
        return self.own.restore() if isinstance(self.own, ArrayProxy) else self.own

    def inside(self) -> Carrier:
        """Return what travels beside the input, which the program has as an array."""
        if isinstance(self.own, ArrayProxy):
            return self
        return dataclasses.replace(self, own=None)

    def at(
        self, others: Sequence[Carrier], key: str, value: Any, own: ArrayProxy | None
    ) -> Carrier:
        """Return what travels beside a value that was computed from this and other inputs.

        Args:
            others: what travels beside the others.
            key: of its expression.
            value: its type, with a shape and a dtype.
            own: its proxy, if it is a view of something that has one.
        """
        derived = {k: one for held in (self, *others) for k, one in held.derived.items()}
        loops = dict(pair for held in (self, *others) for pair in held.loops)
        if loops.get(key) == 0:
            own = derived[key]
        return dataclasses.replace(
            self,
            own=own,
            derived=derived,
            loops=tuple(loops.items()),
            shape=tuple(value.shape),
            dtype=value.dtype,
        )

    def step(self, axis: int, is_mapped: bool = False) -> ArrayProxy:
        """Return what travels into a loop along an axis; its arrays are stepped along their first.

        Args:
            axis: of the input.
            is_mapped: whether ``vmap`` runs the steps at once.
        """
        count = self.shape[axis]
        own = self.own.step(axis, is_mapped) if isinstance(self.own, ArrayProxy) else None
        stepped = {
            key: self.derived[key].step(0, is_mapped)
            for key, n in self.loops
            if n and self.derived[key].shape[0] == count
        }
        stepped = {key: one for key, one in stepped.items() if not isinstance(one, Lost)}
        left = {key: n - 1 for key, n in self.loops if key in stepped}
        shape = (*self.shape[:axis], *self.shape[axis + 1 :])
        if not left:
            return own or Lost(shape, self.dtype, "nothing is derived from a step of it")
        return dataclasses.replace(
            self,
            own=own,
            derived=stepped,
            loops=tuple(left.items()),
            shape=shape,
        )


def proxy_of(held: ArrayProxy | None) -> ArrayProxy | None:
    """Return what stands for a value itself, without what travels beside it."""
    return held.own if isinstance(held, Carrier) else held
