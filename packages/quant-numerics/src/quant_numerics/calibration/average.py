"""Averages and histories of calibrations over the steps of a training or calibration run."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from hijax_trace import Box
from quant_numerics.calibration.calibrate import Calibration

_LARGEST = float(jnp.finfo(jnp.float32).max)
_NOTHING = -1.0
"""What a place of a history holds before a step has filled it. A magnitude of 0 fills it."""


class HistoryState(NamedTuple):
    """What an ``AmaxHistory`` remembers; a pytree.

    Attributes:
      past: largest magnitudes, the newest step first along the last axis, -1 where there is none;
        float32[*shape, length].
      bounds: the last of them that can be a range, 0 if there was none; float32[*shape].
    """

    past: Calibration
    bounds: Calibration

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the bounds."""
        return jnp.shape(self.bounds.upper)

    @property
    def count(self) -> jax.Array:  # pyrefly: ignore[bad-override]
        """Return how many steps are remembered, int32."""
        filled = jnp.sum(self.past.upper > _NOTHING, -1, dtype=jnp.int32)
        return jnp.max(filled, initial=0)


@dataclasses.dataclass(frozen=True)
class AmaxHistory:
    """Delayed scaling: the range of a step follows from the steps before it. Pure and hashable.

    A step need not know its own range before it is quantized, so that XLA can quantize where the
    array is computed. The recipe is ``DelayedScaling`` of NVIDIA's Transformer Engine: the range is
    the largest magnitude of the last `length` steps times ``2**margin``. If that is 0 the range
    stays what it was; before the first step it is that of scale 1. What is not finite is left out:
    Transformer Engine keeps the scale until it has left the history.

    Attributes:
      length: how many steps are remembered, at least 1.
      compute: "max", the largest of them, or "most_recent", the last one.
      margin: powers of two between the largest magnitude and the end of the range.
    """

    length: int = 1024
    compute: Literal["max", "most_recent"] = "max"
    margin: int = 0

    def __post_init__(self):
        if not _is_integer(self.length) or self.length < 1:
            raise ValueError(
                f"length must be a number of steps, 1 or more, got {self.length!r}. Transformer "
                "Engine's is 1024."
            )
        if self.compute not in ("max", "most_recent"):
            raise ValueError(
                f"compute must be 'max' or 'most_recent', got {self.compute!r}. Choose 'max' for "
                "the largest magnitude of all steps."
            )
        if not _is_integer(self.margin) or abs(self.margin) > 64:
            raise ValueError(
                f"margin must be an integer from -64 to 64, got {self.margin!r}. With 1, ranges "
                "are twice as wide."
            )

    def init(self, calibration: Calibration) -> HistoryState:
        """Return an empty history, for calibrations of the shapes of this one.

        Raises:
          ValueError: it has a lower bound.
        """
        if calibration.lower is not None:
            raise ValueError(
                "the calibrations of an AmaxHistory must be symmetric, got one with a lower bound. "
                "Calibrate with a method such as 'absmax', or use a MovingAverage."
            )
        shape = jnp.shape(calibration.upper)
        past = jnp.full((*shape, self.length), _NOTHING, jnp.float32)
        return HistoryState(Calibration(None, past), Calibration(None, jnp.zeros(shape)))

    def begin(self, state: HistoryState) -> HistoryState:
        """Return the state with an empty place for a new step; no second one."""
        past = state.past.upper
        rolled = jnp.roll(past, 1, -1).at[..., 0].set(_NOTHING)
        past = jnp.where((past[..., 0] > _NOTHING).any(), rolled, past)
        return state._replace(past=Calibration(None, past))

    def record(self, state: HistoryState, calibration: Calibration) -> HistoryState:
        """Return the state with a calibration of the step that has begun.

        Of several the largest counts. One of -inf is of no data.
        """
        new = lax.stop_gradient(jnp.asarray(calibration.upper).astype(jnp.float32))
        new = jnp.where(jnp.isfinite(new), new, jnp.where(new == -jnp.inf, _NOTHING, 0.0))
        past = state.past.upper
        newest = jnp.maximum(past[..., 0], new)
        past = past.at[..., 0].set(newest)
        found = jnp.max(past, -1) if self.compute == "max" else newest
        found = jnp.minimum(found * np.float32(2.0) ** self.margin, _LARGEST)
        bounds = jnp.where(found > 0, found, state.bounds.upper)
        return HistoryState(Calibration(None, past), Calibration(None, bounds))

    def update(self, state: HistoryState, calibration: Calibration) -> HistoryState:
        """Return the history with one more calibration."""
        return self.record(self.begin(state), calibration)

    def get(self, state: HistoryState, default: Calibration | None = None) -> Calibration:
        """Return the range of the next step, or `default` (zeros) where none is known."""
        if default is None:
            return state.bounds
        upper = state.bounds.upper
        return Calibration(None, jnp.where(upper > 0, upper, default.upper))

    def during(self, state: HistoryState, calibration: Calibration, first: float) -> Calibration:
        """Return the range of a step: that of the steps before it.

        Args:
          state: the history before the step.
          calibration: that of the step, which does not count yet.
          first: the range where no step was before.
        """
        return self.get(state, Calibration(None, jnp.float32(first)))


def _is_integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


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
