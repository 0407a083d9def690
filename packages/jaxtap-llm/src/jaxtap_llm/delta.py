"""Layers of a gated delta rule (Yang et al. 2024, arXiv:2412.06464): a state instead of a cache.

Each head has a matrix that maps keys to values. A position fades it, then corrects what it returns
for the position's key towards the position's value, and reads it with the position's query.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .config import Config

CHUNK = 64
"""Positions that are computed together, by matmuls."""
GONE = -60.0
"""The logarithm of what is left of a state where a document begins: 1e-26."""


def delta(config: Config, p: Any, x: Any, where: Any, cache: Any, i: Any) -> Any:
    """Return what the layer adds to ``[batch, length, width]``, and the cache with layer i.

    Args:
        where: the tokens are, a ``model.Where``.
        cache: None for none; looked at where there is a position.
        i: int scalar, the place of the layer in it.
    """
    d, (batch, length, _) = config.delta, x.shape
    assert d is not None
    with jax.named_scope("delta_in"):
        inputs, z = jnp.split(x @ p["delta_in"], [d.width], axis=-1)
    with jax.named_scope("gates"):
        gates = (x @ p["delta_gates"]).astype(jnp.float32)
    beta, decay = jnp.split(gates, 2, axis=-1)
    beta, speed = jax.nn.sigmoid(beta), jnp.exp(p["delta_decay"].astype(jnp.float32))
    decay = -speed * jax.nn.softplus(decay + p["delta_bias"].astype(jnp.float32))
    if where.last is not None:  # what fills up a prompt changes nothing
        there = (where.places <= where.last)[:, None]
        beta, decay = jnp.where(there, beta, 0), jnp.where(there, decay, 0)
    if where.documents is not None:
        decay = jnp.where((where.places == 0)[..., None], GONE, decay)
    state = jnp.zeros((batch, d.values, d.key_size, d.value_size), jnp.float32)
    before = jnp.zeros((batch, d.taps - 1, d.width), x.dtype)
    if where.position is not None:
        state, before = (
            lax.dynamic_index_in_dim(cache[name], i, 0, keepdims=False)
            for name in ("state", "conv")
        )
    rows = jnp.concatenate([before.astype(x.dtype), inputs], axis=1)
    mixed = jax.nn.silu(convolved(p["delta_conv"][:, 0], rows, where.documents))
    parts = jnp.split(mixed, [d.keys * d.key_size, 2 * d.keys * d.key_size], axis=-1)
    q, k, v = (
        part.reshape(batch, length, heads, -1).swapaxes(1, 2).astype(jnp.float32)
        for part, heads in zip(parts, (d.keys, d.keys, d.values), strict=True)
    )
    q, k = (jnp.repeat(direction(one), d.values // d.keys, axis=1) for one in (q, k))
    q, beta, decay = q * d.key_size**-0.5, beta.swapaxes(1, 2), decay.swapaxes(1, 2)
    mixed, state = (step if length == 1 else rule)(q, k, v, decay, beta, state)
    mixed = mixed.swapaxes(1, 2)  # [batch, length, heads, value_size]
    scale = lax.rsqrt(jnp.square(mixed).mean(-1, keepdims=True) + config.epsilon)
    mixed = mixed * scale * p["delta_norm"].astype(jnp.float32)
    mixed = mixed * jax.nn.silu(z.reshape(mixed.shape).astype(jnp.float32))
    if cache is not None:
        # The inputs of the last positions, behind the prompt where it was filled up.
        at = length if where.last is None else where.last + 1
        new = {"state": state, "conv": lax.dynamic_slice_in_dim(rows, at, d.taps - 1, axis=1)}
        cache = cache | {
            name: lax.dynamic_update_index_in_dim(
                cache[name], one.astype(cache[name].dtype), i, axis=0
            )
            for name, one in new.items()
        }
    with jax.named_scope("out"):
        return mixed.reshape(batch, length, -1).astype(x.dtype) @ p["out"], cache


def convolved(kernel: Any, rows: Any, documents: Any = None) -> Any:
    """Return each position's mixture of itself and those before, number by number.

    Args:
        kernel: ``[numbers, taps]``.
        rows: ``[batch, taps - 1 + length, numbers]``, with those before the first position.
        documents: as in ``model.Where``: no position sees another document's.
    """
    taps = kernel.shape[1]
    length = rows.shape[1] - taps + 1
    total = 0
    for j in range(taps):
        part = rows[:, j : j + length]
        if documents is not None:
            of = jnp.pad(documents, ((0, 0), (taps - 1 - j, 0)), constant_values=-1)[:, :length]
            part = jnp.where((of == documents)[..., None], part, 0)
        total = total + part * kernel[:, j]
    return total


def direction(x: Any) -> Any:
    """Return x with a length of 1 along the last axis."""
    return x * lax.rsqrt(jnp.square(x).sum(-1, keepdims=True) + 1e-6)


def step(q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any) -> Any:
    """Return what ``rule`` does, of one position."""
    state = state * jnp.exp(decay)[..., None]
    error = (v - k @ state) * beta[..., None]
    state = state + k.swapaxes(-1, -2) @ error
    return q @ state, state


def rule(q: Any, k: Any, v: Any, decay: Any, beta: Any, state: Any) -> Any:
    """Run positions in chunks: within one, what they change is the solution of linear equations.

    Args:
        q: float32 ``[batch, heads, length, key_size]``, as k; v ``[..., value_size]``.
        decay: the logarithms of what is left of the state, ``[batch, heads, length]``.
        beta: how far the state is corrected, as decay.
        state: ``[batch, heads, key_size, value_size]``.

    Returns:
        ``[batch, heads, length, value_size]``, and the state behind the last position.
    """
    length = q.shape[2]
    size = min(CHUNK, length)
    count = -(-length // size)

    def chunks(x: Any) -> Any:
        pad = [(0, 0)] * x.ndim
        pad[2] = 0, count * size - length  # a beta and a logarithm of 0 change nothing
        x = jnp.pad(x, pad).reshape(*x.shape[:2], count, size, *x.shape[3:])
        return jnp.moveaxis(x, 2, 0)

    before = jnp.tril(jnp.ones((size, size), bool), -1)
    own = jnp.tril(jnp.ones((size, size), bool))

    def chunk(state: Any, given: Any) -> Any:
        q, k, v, decay, beta = given
        total = jnp.cumsum(decay, axis=-1)
        # What is left at one position of what another wrote: never above 1.
        left = jnp.exp(jnp.where(own, total[..., :, None] - total[..., None, :], -jnp.inf))
        k_beta = k * beta[..., None]
        system = jnp.where(before, (k_beta @ k.swapaxes(-1, -2)) * left, 0)
        wanted = v * beta[..., None] - (k_beta * jnp.exp(total)[..., None]) @ state
        error = lax.linalg.triangular_solve(
            system + jnp.eye(size), wanted, left_side=True, lower=True, unit_diagonal=True
        )
        out = (q * jnp.exp(total)[..., None]) @ state + ((q @ k.swapaxes(-1, -2)) * left) @ error
        rest = jnp.exp(total[..., -1:] - total)
        state = state * jnp.exp(total[..., -1])[..., None, None]
        return state + (k * rest[..., None]).swapaxes(-1, -2) @ error, out

    state, out = lax.scan(chunk, state, tuple(map(chunks, (q, k, v, decay, beta))))
    out = jnp.moveaxis(out, 0, 2)
    return out.reshape(*out.shape[:2], count * size, -1)[:, :, :length], state
