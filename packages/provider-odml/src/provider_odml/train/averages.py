"""Averages of the ranges of the steps, as sums and counts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn


def calibration_of(row: jax.Array, decay: float | None, symmetric: bool) -> qn.Calibration:
    """Return the average of rows of statistics."""
    lower, upper = _average(row, decay)
    return qn.Calibration(None if symmetric else lower, upper)


def _average(row: jax.Array, decay: float | None) -> tuple[jax.Array, jax.Array]:
    """Return the average bounds, float32."""
    weight = _weight(row[..., 2], decay)
    return row[..., 0] / weight, row[..., 1] / weight


def _weight(count: jax.Array, decay: float | None) -> jax.Array:
    """Return what sums of so many ranges are divided by, float32."""
    weight = count if decay is None else 1.0 - jnp.float32(decay) ** count
    return jnp.maximum(weight, jnp.float32(1.0 if decay is None else 1.0 - decay))


def terms_of(rows: jax.Array, decay: float | None) -> jax.Array:
    """Return what the average of each row needs when a site asks for it.

    Computed for all sites at once, so that a site has fewer operations.

    Args:
        rows: sums and counts, float32[rows, 3].
        decay: of the moving average.

    Returns:
        float32[rows, 5, 2], for the lower and the upper bound: sum and weight as they are when one
        more range is added, sum and weight without it, and the count.
    """
    rows = lax.stop_gradient(rows)
    sums, count = rows[:, :2], rows[:, 2:]
    after = sums if decay is None else np.float32(decay) * sums
    parts = [after, _weight(count + 1, decay), sums, _weight(count, decay), count]
    return jnp.stack([jnp.broadcast_to(part, sums.shape) for part in parts], 1)


def added(rows: jax.Array, bounds: jax.Array, decay: float | None) -> jax.Array:
    """Return statistics with the ranges of one call.

    Args:
        rows: sums and counts, float32[rows, 3].
        bounds: of each row, float32[rows, 2]; rows that are not finite are left out.
        decay: of the moving average.
    """
    rows, bounds = lax.stop_gradient((rows, bounds))
    keep, add = (1.0, 1.0) if decay is None else (decay, 1.0 - decay)
    sums = np.float32(keep) * rows[:, :2] + np.float32(add) * bounds
    new = jnp.concatenate([sums, rows[:, 2:] + 1], 1)
    return jnp.where(jnp.isfinite(bounds).all(1, keepdims=True), new, rows)


def joined_row(rows: jax.Array, decay: float | None) -> jax.Array:
    """Return a row whose range holds those of all seen rows.

    Args:
        rows: float32[..., 3].
        decay: of the moving average.
    """
    rows = rows.reshape(-1, 3)
    seen = rows[:, 2] > 0
    lower, upper = _average(rows, decay)
    lower = jnp.min(jnp.where(seen, lower, jnp.inf))
    upper = jnp.max(jnp.where(seen, upper, -jnp.inf))
    weight = np.float32(1.0 if decay is None else 1.0 - decay)
    one = jnp.stack([lower * weight, upper * weight, jnp.float32(1)])
    return jnp.where(seen.any(), one, jnp.float32(0))
