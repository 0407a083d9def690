"""Tokens to experts and back in plain JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def row_map(_: None, routing_map: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the map of rows, and how many tokens each expert has."""
    routed = routing_map.astype(bool)
    experts = routed.shape[1]
    ones = routed.astype(jnp.int32)
    counts = ones.sum(0, dtype=jnp.int32)
    starts = jnp.cumsum(counts) - counts
    rows = jnp.where(routed, starts[None] + jnp.cumsum(ones, 0) - 1, -1)
    # The experts of a token first, in their order.
    order = jnp.argsort(~routed, axis=1, stable=True).astype(jnp.int32)
    total = ones.sum(1, keepdims=True, dtype=jnp.int32)
    used = jnp.arange(experts)[None] < total
    rows = jnp.where(used, jnp.take_along_axis(rows, order, 1), -1)
    entries = [rows, jnp.where(used, order, -1), total]
    return jnp.concatenate(entries, 1).astype(jnp.int32), counts


def _places(
    row_id_map: jax.Array, pad_offsets: jax.Array, rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return rows and experts [tokens, experts], and which entries are used."""
    experts = row_id_map.shape[1] // 2
    place, expert = row_id_map[:, :experts], row_id_map[:, experts:-1]
    used = jnp.arange(experts)[None] < row_id_map[:, -1:]
    used &= (expert >= 0) & (expert < experts)
    expert = jnp.where(used, expert, 0)
    if pad_offsets.size:
        place = place + pad_offsets[expert]
    used &= (place >= 0) & (place < rows)
    return jnp.where(used, place, rows), expert, used


def permute(
    rows: int, x: jax.Array, row_id_map: jax.Array, probs: jax.Array, pad_offsets: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return rows with tokens (zero without one), and their probabilities."""
    place, expert, _ = _places(row_id_map, pad_offsets, rows)
    shape = (*place.shape, x.shape[1])
    moved = jnp.broadcast_to(x[:, None], shape).reshape(-1, x.shape[1])
    out = jnp.zeros((rows, x.shape[1]), x.dtype).at[place.reshape(-1)].set(moved, mode="drop")
    if not probs.size:
        return out, jnp.zeros((0,), probs.dtype)
    given = jnp.take_along_axis(probs, expert, 1).reshape(-1)
    permuted = jnp.zeros((rows,), probs.dtype).at[place.reshape(-1)].set(given, mode="drop")
    return out, permuted


def unpermute(
    _: None,
    x: jax.Array,
    row_id_map: jax.Array,
    merging_probs: jax.Array,
    permuted_probs: jax.Array,
    pad_offsets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return sums of tokens' rows, and probabilities by token and expert."""
    tokens, experts = row_id_map.shape[0], row_id_map.shape[1] // 2
    place, expert, used = _places(row_id_map, pad_offsets, x.shape[0])
    taken = jnp.take(x, place, axis=0, mode="fill", fill_value=0).astype(jnp.float32)
    if merging_probs.size:
        taken = taken * jnp.take_along_axis(merging_probs, expert, 1).astype(jnp.float32)[..., None]
    out = jnp.where(used[..., None], taken, 0).sum(1).astype(x.dtype)
    if not permuted_probs.size:
        return out, jnp.zeros((0, 0), permuted_probs.dtype)
    probs = jnp.take(permuted_probs, place, mode="fill", fill_value=0)
    at = jnp.where(used, expert, experts)
    token = jnp.arange(tokens)[:, None]
    return out, jnp.zeros((tokens, experts), probs.dtype).at[token, at].set(probs, mode="drop")


def unpermute_gradient(
    _: None,
    grad: jax.Array,
    row_id_map: jax.Array,
    x: jax.Array,
    merging_probs: jax.Array,
    pad_offsets: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of rows and of merging probabilities."""

    def merged(x: jax.Array, probs: jax.Array) -> jax.Array:
        nothing = jnp.zeros((0,), probs.dtype)
        return unpermute(None, x, row_id_map, probs, nothing, pad_offsets)[0]

    return jax.vjp(merged, x, merging_probs)[1](grad)
