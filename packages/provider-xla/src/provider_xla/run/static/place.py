"""Place: the bounds of the step of a loop that a program is in, among those of all steps."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn

from ...program.sites import Site


class Place(NamedTuple):
    """A site's place in bounds of shape (*steps, 1, ..., 1).

    Attributes:
        index: the number of the step in each loop; None for all of them.
    """

    index: tuple[Any, ...]

    @classmethod
    def of(cls, site: Site, bounds: qn.Calibration, ndim: int = 0) -> Place:
        """Return the place of a site in bounds of an array. Loops of other lengths are joined."""
        lengths = bounds.upper.shape[: bounds.upper.ndim - ndim]
        if not lengths:
            return cls(())
        steps = [step for step in site.call.steps or () if step.length is not None]
        if tuple(step.length for step in steps) != lengths:
            return cls((None,) * len(lengths))
        return cls(tuple(step.index for step in steps))

    @property
    def is_one(self) -> bool:
        """Return whether it is a single step."""
        return all(index is not None for index in self.index)

    def take(self, bounds: qn.Calibration) -> qn.Calibration:
        """Return a step's bounds, with its axes of size 1."""
        if not self.index:
            return bounds

        def part(bound: jax.Array) -> jax.Array:
            sizes = [n if i is None else 1 for n, i in zip(bound.shape, self.index, strict=False)]
            sizes += bound.shape[len(sizes) :]
            return lax.dynamic_slice(bound, self._starts(bound), sizes)

        return jax.tree.map(part, bounds)

    def put(self, bounds: qn.Calibration, part: qn.Calibration) -> qn.Calibration:
        """Return bounds with those of the steps replaced."""
        if not self.index:
            return part

        def replaced(bound: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(bound, new, self._starts(bound))

        return jax.tree.map(replaced, bounds, part)

    def state(self, state: Any) -> Any:
        """Return the part of a state of statistics that is about the steps."""
        return type(state)(
            *(self.take(part) if isinstance(part, qn.Calibration) else part for part in state)
        )

    def put_state(self, state: Any, part: Any) -> Any:
        """Return a state of statistics with that part replaced."""
        pairs = zip(state, part, strict=True)
        return type(state)(
            *(self.put(old, new) if isinstance(old, qn.Calibration) else new for old, new in pairs)
        )

    def joined(self, part: qn.Calibration) -> qn.Calibration:
        """Return the range that holds those of the steps, without their axes."""
        axes = tuple(range(len(self.index)))
        if not axes:
            return part
        lower = None if part.lower is None else jnp.min(part.lower, axes)
        return qn.Calibration(lower, jnp.max(part.upper, axes))

    def _starts(self, bound: jax.Array) -> list[Any]:
        zero = np.int32(0)
        starts = [zero if index is None else index for index in self.index]
        return [*starts, *[zero] * (bound.ndim - len(starts))]


def filled(seen: qn.Calibration) -> qn.Calibration:
    """Return bounds where unseen steps take those of all seen."""

    def fill(bound: jax.Array, unseen: float, extreme: Any) -> jax.Array:
        return jnp.where(bound == unseen, extreme(bound), bound)

    lower = None if seen.lower is None else fill(seen.lower, jnp.inf, jnp.min)
    return qn.Calibration(lower, fill(seen.upper, -jnp.inf, jnp.max))


def scalar(bounds: qn.Calibration) -> qn.Calibration:
    """Return the range of a gradient, of shape ()."""
    return qn.Calibration(None, bounds.upper.reshape(()))
