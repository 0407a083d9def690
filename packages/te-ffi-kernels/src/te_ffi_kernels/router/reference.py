"""The router in plain JAX, in float32."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from . import config as checks
from .config import Options, RoutingMapFormat, ScoreFunction

_EPSILON = np.float32(1e-20)


def forward(
    of: Options, logits: jax.Array, bias: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return weights or scores, routing map and residuals."""
    x = logits.astype(jnp.float32)
    of_all = of.pre_softmax or of.dense
    if of.score is ScoreFunction.SOFTMAX:
        scores = saved = jax.nn.softmax(x) if of_all else x
    elif of.score is ScoreFunction.SIGMOID:
        scores = saved = jax.nn.sigmoid(x)
    else:
        scores, saved = jnp.sqrt(jax.nn.softplus(x)), x
    if of.dense and of.score is not ScoreFunction.SOFTMAX:
        scores = scores / (jnp.sum(scores, -1, keepdims=True) + _EPSILON)
    ranked = scores
    if bias.size:
        wide = bias.astype(jnp.float32).reshape((1,) * (x.ndim - 1) + bias.shape)
        ranked = scores + jnp.broadcast_to(wide, x.shape)
    chosen = _best(of, ranked)
    routed = _scatter(jnp.ones(chosen.shape, bool), chosen, x.shape, False)
    routing_map = routed
    if of.format is RoutingMapFormat.BITMAP_U8:
        routing_map = jnp.packbits(routed, -1, bitorder="little")
    if of.dense:
        return scores.astype(logits.dtype), routing_map, saved
    picked = jnp.take_along_axis(scores, chosen, -1)
    if of.score is ScoreFunction.SOFTMAX and not of.pre_softmax:
        picked = jax.nn.softmax(picked)
        saved = _scatter(picked, chosen, x.shape, -np.inf)
    elif of.score is not ScoreFunction.SOFTMAX and of.topk > 1:
        picked = picked / (jnp.sum(picked, -1, keepdims=True) + _EPSILON)
    probs = _scatter(picked * np.float32(of.scaling), chosen, x.shape, 0.0)
    return probs.astype(logits.dtype), routing_map, saved


def backward(
    of: Options, routing_map: jax.Array, saved: jax.Array, grad_probs: jax.Array
) -> jax.Array:
    """Return the gradient of logits, for checked arguments."""
    grad = grad_probs.astype(jnp.float32) * np.float32(of.scaling)
    if of.dense:
        routed = jnp.ones(grad.shape, bool)
    elif of.format is RoutingMapFormat.BITMAP_U8:
        routed = jnp.unpackbits(routing_map, -1, grad.shape[-1], bitorder="little") != 0
    else:
        routed = routing_map.astype(bool)
    values = saved
    if of.score is ScoreFunction.SQRTSOFTPLUS:
        values = jnp.sqrt(jax.nn.softplus(saved))
    kept = jnp.where(routed, values, 0)
    dot = jnp.sum(grad * kept, -1, keepdims=True)
    if of.score is ScoreFunction.SOFTMAX:
        of_all = of.pre_softmax or of.dense
        found = (jnp.where(routed, grad, 0) - dot) * (values if of_all else kept)
        return found.astype(grad_probs.dtype)
    if of.dense or of.topk > 1:
        total = jnp.sum(kept, -1, keepdims=True) + _EPSILON
        grad = grad / total - dot / total / total
    grad = jnp.where(routed, grad, 0)
    if of.score is ScoreFunction.SIGMOID:
        return (grad * values * (1 - values)).astype(grad_probs.dtype)
    slope = jax.nn.sigmoid(saved) / (2 * values + _EPSILON)
    return (grad * slope).astype(grad_probs.dtype)


def loss(
    topk: int, coeff: float, probs: jax.Array, tokens_per_expert: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return the loss and what is saved, for [..., tokens, experts]."""
    tokens, count = probs.shape[-2:]
    scale = checks.coefficient(tokens, count, topk, coeff)
    sums = jnp.sum(probs.astype(jnp.float32), -2)
    found = jnp.sum(sums * tokens_per_expert.astype(jnp.float32), -1) * np.float32(scale)
    scales = jnp.full(found.shape, np.float32(scale))
    return found.astype(probs.dtype), jnp.stack([scales, found], -1)


def loss_gradient(
    tokens: int, const_buf: jax.Array, tokens_per_expert: jax.Array, grad: jax.Array
) -> jax.Array:
    """Return the gradient of probs for one or several losses."""
    counts = tokens_per_expert.astype(jnp.float32)
    row = const_buf[..., :1] * counts * grad.astype(jnp.float32)[..., None]
    shape = (*counts.shape[:-1], tokens, counts.shape[-1])
    return jnp.broadcast_to(row[..., None, :], shape).astype(grad.dtype)


def _best(of: Options, scores: jax.Array) -> jax.Array:
    """Return indices of the experts chosen."""
    if not of.in_groups:
        return lax.top_k(scores, of.topk)[1]
    size = scores.shape[-1] // of.groups
    in_groups = scores.reshape(*scores.shape[:-1], of.groups, size)
    sums = jnp.sum(lax.top_k(in_groups, of.topk // of.group_topk)[0], -1)
    # Sorted, so that of equal scores the expert with the lower index comes first.
    groups = jnp.sort(lax.top_k(sums, of.group_topk)[1], -1)
    members = groups[..., None] * size
    members = jnp.broadcast_to(members, (*groups.shape, size))
    members = members + lax.broadcasted_iota(members.dtype, members.shape, members.ndim - 1)
    members = members.reshape(*groups.shape[:-1], of.group_topk * size)
    among = jnp.take_along_axis(scores, members, -1)
    return jnp.take_along_axis(members, lax.top_k(among, of.topk)[1], -1)


def _scatter(values: jax.Array, at: jax.Array, shape: Any, otherwise: Any) -> jax.Array:
    """Return rows with values at some of their places."""
    rows = jax.vmap(lambda row, i, value: row.at[i].set(value, unique_indices=True))
    out = jnp.full((math.prod(shape[:-1]), shape[-1]), otherwise, values.dtype)
    flat = (one.reshape(-1, one.shape[-1]) for one in (at, values))
    return rows(out, *flat).reshape(shape)
