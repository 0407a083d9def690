"""Averages of ranges, row by row of a table: ``quant_numerics.MovingAverage``."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn


def state_of(rows: jax.Array) -> qn.AverageState:
    """Return the averages that rows hold, sums and counts: float32[..., 3]."""
    return qn.AverageState(qn.Calibration(rows[..., 0], rows[..., 1]), rows[..., 2])


def terms_of(rows: jax.Array, average: qn.MovingAverage) -> jax.Array:
    """Return what the average of each row needs when a site asks for it.

    Computed for all sites at once, so that a site has fewer operations.

    Args:
        rows: sums and counts, float32[rows, 3].
        average: how they are averaged.

    Returns:
        float32[rows, 5, 2], for the lower and the upper bound: sum and weight as they are when one
        more range is added, sum and weight without it, and the count.
    """
    rows = lax.stop_gradient(rows)
    sums, count = rows[:, :2], rows[:, 2:]
    after = sums if average.decay is None else np.float32(average.decay) * sums
    parts = [after, average.weight(count + 1), sums, average.weight(count), count]
    return jnp.stack([jnp.broadcast_to(part, sums.shape) for part in parts], 1)


def added(rows: jax.Array, bounds: jax.Array | np.ndarray, average: qn.MovingAverage) -> jax.Array:
    """Return statistics with the ranges of one call.

    Args:
        rows: sums and counts, float32[rows, 3].
        bounds: of each row, float32[rows, 2]; rows that are not finite are left out.
        average: how they are averaged.
    """
    total, count = state_of(lax.stop_gradient(rows))
    state = qn.AverageState(total, count.astype(jnp.int32))
    new = jax.vmap(average.update)(state, qn.Calibration(bounds[:, 0], bounds[:, 1]))
    assert new.total.lower is not None
    return jnp.stack([new.total.lower, new.total.upper, new.count.astype(jnp.float32)], 1)


def joined_row(rows: jax.Array, average: qn.MovingAverage) -> jax.Array:
    """Return a row whose range holds those of all seen rows.

    Args:
        rows: float32[..., 3].
        average: how they are averaged.
    """
    rows = rows.reshape(-1, 3)
    seen, found = rows[:, 2] > 0, average.get(state_of(rows))
    assert found.lower is not None
    lower = jnp.min(jnp.where(seen, found.lower, jnp.inf))
    upper = jnp.max(jnp.where(seen, found.upper, -jnp.inf))
    weight = np.float32(1.0 if average.decay is None else 1.0 - average.decay)
    one = jnp.stack([lower * weight, upper * weight, jnp.float32(1)])
    return jnp.where(seen.any(), one, jnp.float32(0))
