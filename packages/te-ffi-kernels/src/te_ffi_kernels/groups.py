"""Rows of groups: whose they are, and the two orders in which groups lie in memory."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax


def owner(sizes: jax.Array, length: int) -> jax.Array:
    """Return the group of each row, int32[length].

    Rows of no group have the number of groups.
    """
    return jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(length), side="right").astype(jnp.int32)


def per_row(of_group: jax.Array, owners: jax.Array) -> jax.Array:
    """Return each row's value of its group; zero for rows of none."""
    none = jnp.zeros((1, *of_group.shape[1:]), of_group.dtype)
    return jnp.concatenate([of_group, none])[owners]


def sums_by_group(rows: jax.Array, owners: jax.Array, groups: int) -> jax.Array:
    """Return the sums of the rows of each group."""
    return jax.ops.segment_sum(rows, owners, groups + 1)[:groups]


def only_owned(rows: jax.Array, owners: jax.Array, groups: int) -> jax.Array:
    """Return the rows, those of no group as zeros, whatever they hold."""
    kept = (owners < groups).reshape(-1, *(1,) * (rows.ndim - 1))
    return jnp.where(kept, rows, jnp.zeros_like(rows))


def as_rows(x: jax.Array, sizes: jax.Array, length: int) -> jax.Array:
    """Return [length, across] of matrices [across, size] that follow each other."""
    return x.reshape(-1)[_places(sizes, length, x.size // max(length, 1))]


def as_matrices(rows: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return what ``as_rows`` was given, flat."""
    length, across = rows.shape
    at = _places(sizes, length, across)
    return jnp.zeros(length * across, rows.dtype).at[at].set(rows, unique_indices=True)


def _places(sizes: jax.Array, length: int, across: int) -> jax.Array:
    """Return where numbers of rows are in memory, int32[length, across]."""
    owners = owner(sizes, length)[:, None]
    ends = jnp.cumsum(sizes)
    # Rows of no group lie after all groups, row by row.
    start = per_row(ends - sizes, owners[:, 0])[:, None]
    size = per_row(sizes, owners[:, 0])[:, None]
    t = lax.broadcasted_iota(jnp.int32, (length, across), 0)
    c = lax.broadcasted_iota(jnp.int32, (length, across), 1)
    # A group's matrix [across, size] follows those of the rows before it.
    inside = start * across + c * size + t - start
    return jnp.where(owners < sizes.shape[0], inside, t * across + c)
