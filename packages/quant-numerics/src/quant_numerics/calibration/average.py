"""Averages of calibrations over the steps of a training or calibration run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from hijax_trace import Box
from quant_numerics.calibration.history import AmaxHistory
from quant_numerics.calibration.scale import Calibration


class AverageState(NamedTuple):
    """The sums of a ``MovingAverage``; a pytree.

    Attributes:
      total: weighted sums of the bounds, float32.
      count: how many calibrations were added, int32.
    """

    total: Calibration
    count: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the bounds."""
        return jnp.shape(self.total.upper)


@dataclasses.dataclass(frozen=True)
class MovingAverage:
    """An average of calibrations, over all or with exponential decay. Pure and hashable.

    Attributes:
      decay: None for the mean of all; or the share of the average that a step keeps, above 0 and
        below 1.
        The first steps are not biased to zero: weights are divided by their sum (section 3 of
        Kingma & Ba 2015, arXiv:1412.6980).
    """

    decay: float | None = None

    def __post_init__(self):
        if self.decay is not None and not 0 < self.decay < 1:
            raise ValueError(
                "decay must be None (the mean of all) or between 0 and 1, got "
                f"{self.decay!r}. Choose 0.99 to average about 100 steps."
            )

    def init(self, calibration: Calibration) -> AverageState:
        """Return an empty average, for calibrations of the shapes of this one."""
        zeros = jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.float32), calibration)
        return AverageState(zeros, jnp.zeros((), jnp.int32))

    def update(self, state: AverageState, calibration: Calibration) -> AverageState:
        """Return the average with one more calibration, if that is finite."""
        values = jax.tree.map(
            lambda x: lax.stop_gradient(jnp.asarray(x).astype(jnp.float32)), calibration
        )
        keep, add = (1.0, 1.0) if self.decay is None else (self.decay, 1.0 - self.decay)
        finite = jnp.array(True)
        for leaf in jax.tree.leaves(values):
            finite &= jnp.isfinite(leaf).all()
        total = jax.tree.map(
            lambda old, new: jnp.where(finite, keep * old + add * new, old), state.total, values
        )
        return AverageState(total, state.count + finite.astype(jnp.int32))

    def get(self, state: AverageState, default: Calibration | None = None) -> Calibration:
        """Return the average, or `default` (zeros) if no calibration was added."""
        weight = self.weight(state.count)
        average = jax.tree.map(lambda x: x / weight, state.total)
        if default is None:
            return average
        return jax.tree.map(
            lambda a, d: jnp.where(state.count > 0, a, jnp.asarray(d).astype(jnp.float32)),
            average,
            default,
        )

    def weight(self, count: jax.Array) -> jax.Array:
        """Return what the sums of `count` calibrations are divided by, float32: 1 for none."""
        weight = count.astype(jnp.float32)
        if self.decay is not None:
            weight = 1.0 - jnp.float32(self.decay) ** weight
        return jnp.where(count > 0, weight, 1.0)

    def during(self, state: AverageState, calibration: Calibration, first: float) -> Calibration:
        """Return the average that a step uses: with its own calibration.

        Args:
          state: the average before the step.
          calibration: that of the step.
          first: a range for histories that don't know the step's own.
        """
        return self.get(self.update(state, calibration))


class Statistics:
    """A moving average, or a history, of calibrations in a ``hijax_trace.Box``.

    It may be closed over or passed as an argument under jit, scan, remat and grad: what is observed
    inside is seen outside. It is a pytree with the Box as its child; `state` reads and restores it.

    Args:
      shape: shape of the bounds.
      average: how ranges follow from calibrations: a ``MovingAverage`` or an ``AmaxHistory``.
      symmetric: False for calibrations that have a lower bound, too.

    Raises:
      ValueError: a lower bound in an ``AmaxHistory``.
    """

    def __init__(
        self,
        shape: Sequence[int],
        average: MovingAverage | AmaxHistory = MovingAverage(),
        *,
        symmetric: bool = True,
    ):
        bound = jnp.zeros(tuple(shape), jnp.float32)
        self._average: Any = average
        self._symmetric = symmetric
        nothing = average.init(Calibration(None if symmetric else bound, bound))
        self._box = Box(nothing, differentiated=False)

    @property
    def average(self) -> MovingAverage | AmaxHistory:
        """Return how ranges follow from calibrations."""
        return self._average

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the bounds."""
        return self.state.shape

    @property
    def symmetric(self) -> bool:
        """Return whether calibrations have no lower bound."""
        return self._symmetric

    @property
    def state(self) -> Any:
        """Return what is remembered, a pytree. Set it to that of an equal average."""
        return self._box.get()

    @state.setter
    def state(self, state: Any) -> None:
        like = jax.tree.structure(self._box.get())
        self._box.set(jax.tree.unflatten(like, jax.tree.leaves(state)))

    @property
    def count(self) -> jax.Array:
        """Return how many calibrations are remembered, int32."""
        return self.state.count

    def observe(self, calibration: Calibration) -> None:
        """Add a calibration, without derivative, where it is finite.

        Raises:
          ValueError: bounds of another shape; a lower bound although `symmetric`, or none.
        """
        if (calibration.lower is None) != self._symmetric:
            raise ValueError(
                f"a calibration must be {'without' if self._symmetric else 'with'} a lower bound "
                f"for Statistics(..., symmetric={self._symmetric}), got one "
                f"{'with' if self._symmetric else 'without'} it. Make them with "
                f"symmetric={not self._symmetric}, or calibrate with another method."
            )
        state = self.state
        if state.shape != (given := jnp.shape(calibration.upper)):
            raise ValueError(
                f"a calibration must have bounds of shape {state.shape}, as those before, got "
                f"shape {given}. Calibrate with the same channel and tile axes in each step."
            )
        self._box.set(self._average.update(state, calibration))

    def calibration(self, default: Calibration | None = None) -> Calibration:
        """Return the range, or `default` (zeros) if nothing was observed."""
        return self._average.get(self.state, default)

    def __repr__(self) -> str:
        return f"Statistics({self._average}, symmetric={self._symmetric})"


_Static = tuple[MovingAverage | AmaxHistory, bool]


def _flatten(s: Statistics) -> tuple[tuple[Box], _Static]:
    return (s._box,), (s._average, s._symmetric)


def _flatten_with_keys(s: Statistics) -> tuple[tuple[Any], _Static]:
    return ((jax.tree_util.GetAttrKey("state"), s._box),), (s._average, s._symmetric)


def _unflatten(static: _Static, parts: Any) -> Statistics:
    s = object.__new__(Statistics)
    (s._box,) = parts
    s._average, s._symmetric = static
    return s


jax.tree_util.register_pytree_with_keys(Statistics, _flatten_with_keys, _unflatten, _flatten)
