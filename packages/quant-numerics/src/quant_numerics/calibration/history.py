"""Histories of the largest magnitudes of steps: delayed scaling."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quant_numerics.calibration.scale import Calibration

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
