"""Decoders of families as Llama, Qwen and Gemma, written plainly: functions over a tree.

Kernels of dense layers are ``[in, out]``; those of all layers are stacked, and the program scans
over them. Queries, keys and values are one kernel, as are gate and up, so that a row is read, and
quantized, once. What differs from layer to layer (windows, rotary bases) is data of the scan.

The cache is ``{"k", "v"}``, each ``[layers, batch, kv_heads, positions, head_size]``. The scan
carries it, and each layer writes its new positions where they lie.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def logits(config, params, tokens, documents=None, remat=False):
    """Return float32 ``[batch, length, vocabulary]`` for int ``[batch, length]``.

    Args:
        tokens: int ``[batch, length]``.
        documents: int ``[batch, length]``, for rows of several documents, one after the other: the
            number of each token's. A token sees those of its document alone, and positions begin
            with it. None where a row is one document.
        remat: whether gradients compute each layer again instead of keeping what is inside it.
    """
    x = embed(config, params, tokens)
    x, _ = run_layers(config, params["layers"], x, documents=documents, remat=remat)
    return head(config, params, x)


def prefill(config, params, tokens, cache, last):
    """Run a prompt from position 0 on.

    Args:
        tokens: int ``[batch, length]``; what follows the prompt is overwritten by what is decoded.
        cache: an empty one, of at least as many positions.
        last: int scalar, the position of the prompt's last token.

    Returns:
        The logits behind that, ``[batch, vocabulary]``, and the cache.
    """
    x, cache = run_layers(config, params["layers"], embed(config, params, tokens), cache)
    return head(config, params, lax.dynamic_slice_in_dim(x, last, 1, axis=1))[:, 0], cache


def decode(config, params, tokens, cache, position):
    """Run one token of each sequence.

    Args:
        tokens: int ``[batch]``.
        cache: of the positions before.
        position: int scalar, that of the tokens.

    Returns:
        The logits behind it, ``[batch, vocabulary]``, and the cache.
    """
    x = embed(config, params, tokens[:, None])
    x, cache = run_layers(config, params["layers"], x, cache, position)
    return head(config, params, x)[:, 0], cache


def make_cache(config, batch, positions, dtype=jnp.float32):
    """Return an empty cache."""
    shape = config.layers, batch, config.kv_heads, positions, config.head_size
    return {"k": jnp.zeros(shape, dtype), "v": jnp.zeros(shape, dtype)}


def embed(config, params, tokens):
    """Return ``[batch, length, width]`` for int ``[batch, length]``."""
    x = params["embed"][tokens]
    return x * jnp.asarray(config.width**0.5, x.dtype) if config.gemma else x


def head(config, params, x):
    """Return the logits of ``[batch, length, width]``, float32."""
    x = norm(config, params["norm"], x)
    with jax.named_scope("head"):
        kernel = params["embed"].T if config.tied else params["head"]
        out = (x @ kernel).astype(jnp.float32)
    return softcapped(out, config.final_softcap)


def run_layers(config, layers, x, cache=None, position=None, documents=None, remat=False):
    """Run all layers on ``[batch, length, width]``.

    Args:
        cache: None for none.
        position: of the first token; None for 0, where nothing in the cache is looked at.
        documents: as for ``logits``, and ``remat``.

    Returns:
        As x, and the cache.
    """
    if documents is None:
        places = (0 if position is None else position) + jnp.arange(x.shape[1])
    else:
        places = places_in(documents)
    turns, kinds = rotations(config, places, x.dtype)

    def layer(carry, given):
        x, cache = carry
        p, window, kind, i = given
        with jax.named_scope("attention"):
            y = norm(config, p["attention_norm"], x)
            y, cache = attention(config, p, y, turns[kind], window, cache, i, position, documents)
            y = norm(config, p["attention_post_norm"], y) if config.gemma else y
        x = x + y
        with jax.named_scope("mlp"):
            y = norm(config, p["mlp_norm"], x)
            y = experts(config, p, y) if config.experts else mlp(config, p, y)
            y = norm(config, p["mlp_post_norm"], y) if config.gemma else y
        return (x + y, cache), None

    layer = jax.checkpoint(layer) if remat else layer
    given = layers, jnp.asarray(config.windows, jnp.int32), kinds, jnp.arange(config.layers)
    return lax.scan(layer, (x, cache), given)[0]


def places_in(documents):
    """Return the position of each token in its document, int ``[batch, length]``."""
    at = jnp.broadcast_to(jnp.arange(documents.shape[1]), documents.shape)
    before = jnp.pad(documents[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return at - lax.cummax(jnp.where(documents != before, at, 0), axis=1)


def attention(config, p, x, turns, window, cache, i, position, documents):
    """Return what attention adds to ``[batch, length, width]``, and the cache with layer i."""
    batch, length, _ = x.shape
    heads, groups, size = config.heads, config.kv_heads, config.head_size
    qkv = dense(p, "qkv", x).reshape(batch, length, heads + 2 * groups, size)
    q, k, v = jnp.split(qkv, [heads, heads + groups], axis=2)
    if config.head_norms:
        q, k = norm(config, p["q_norm"], q), norm(config, p["k_norm"], k)
    q, k = rotate(q, turns), rotate(k, turns)
    if cache is not None:
        at = i, 0, 0, 0 if position is None else position, 0
        cache = {
            name: lax.dynamic_update_slice(cache[name], one.swapaxes(1, 2)[None], at)
            for name, one in (("k", k), ("v", v))
        }
    if position is not None:
        assert cache is not None
        k, v = (lax.dynamic_index_in_dim(cache[name], i, 0, keepdims=False) for name in "kv")
        mixed = attend(config, p, q, k, v, seen(config, position, length, k.shape[2], window))
    elif config.softcap or config.sinks:
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        mixed = attend(config, p, q, k, v, seen(config, 0, length, length, window, documents))
    else:
        # A function that rules know by name: kernel="fused" runs it in one pass.
        is_plain = documents is None and not any(config.windows)
        mask = None if is_plain else seen(config, 0, length, length, window, documents)
        mixed = jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=config.scale, is_causal=mask is None
        )
    return dense(p, "out", mixed.reshape(batch, length, heads * size)), cache


def seen(config, position, queries, keys, window, documents=None):
    """Return bool ``[batch or 1, 1, queries, keys]``: which positions a query sees."""
    at, query = jnp.arange(keys), position + jnp.arange(queries)[:, None]
    mask = at <= query
    if any(config.windows):
        mask &= (window == 0) | (at > query - window)
    if documents is not None:
        mask = mask & (documents[:, :, None] == documents[:, None])
        return mask[:, None]
    return mask[None, None]


def attend(config, p, q, k, v, mask):
    """Attend with ``[batch, length, heads, size]`` to ``[batch, kv_heads, positions, size]``.

    Queries that share keys are the rows of one matmul, and nothing of the cache is transposed.
    """
    batch, length, heads, size = q.shape
    rows = q.reshape(batch, length, config.kv_heads, -1, size).transpose(0, 2, 3, 1, 4)
    groups, shape = rows.shape[2], (batch, config.kv_heads, -1, size)
    scores = jnp.einsum("bkrd,bksd->bkrs", rows.reshape(shape), k).astype(jnp.float32)
    scores = softcapped(scores * config.scale, config.softcap)
    # [batch, kv_heads, groups, length, positions]
    scores = scores.reshape(*rows.shape[:4], -1)
    scores = jnp.where(mask[:, :, None], scores, -1e30)
    if config.sinks:  # a score with nothing to mix
        sinks = p["sinks"].astype(jnp.float32).reshape(config.kv_heads, groups, 1, 1)
        scores = jnp.concatenate([scores, jnp.broadcast_to(sinks, (*scores.shape[:-1], 1))], -1)
    weights = jax.nn.softmax(scores).astype(v.dtype)[..., : k.shape[2]]
    mixed = jnp.einsum("bkrs,bksd->bkrd", weights.reshape(*k.shape[:2], groups * length, -1), v)
    return mixed.reshape(rows.shape).transpose(0, 3, 1, 2, 4).reshape(batch, length, heads, size)


def mlp(config, p, x):
    """Return what the MLP adds to ``[batch, length, width]``."""
    return dense(p, "down", gated(config, dense(p, "gate_up", x)))


def experts(config, p, x):
    """Return the sum of each token's experts: its rows are sorted by expert, and multiplied so."""
    rows = x.reshape(-1, x.shape[-1])
    with jax.named_scope("router"):
        chances = jax.nn.softmax(biased(p, "router", rows @ p["router"]).astype(jnp.float32))
    weights, chosen = lax.top_k(chances, config.experts_per_token)
    if config.normalize_experts:
        weights = weights / weights.sum(-1, keepdims=True)
    chosen = chosen.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    token, of = order // config.experts_per_token, chosen[order]
    sizes = jnp.bincount(chosen, length=config.experts).astype(jnp.int32)
    with jax.named_scope("gate_up"):
        inner = biased(p, "gate_up", lax.ragged_dot(rows[token], p["gate_up"], sizes), of)
    with jax.named_scope("down"):
        out = biased(p, "down", lax.ragged_dot(gated(config, inner), p["down"], sizes), of)
    out = out * weights.reshape(-1)[order, None].astype(out.dtype)
    return jnp.zeros_like(rows).at[token].add(out).reshape(x.shape)


def dense(p, name, x):
    """Return x times the kernel of a name, in a scope of that name, plus its bias if it has one."""
    with jax.named_scope(name):
        return biased(p, name, x @ p[name])


def biased(p, name, y, of=slice(None)):
    """Return y plus the bias that a projection may have, of the experts that rows have."""
    return y + p[f"{name}_bias"][of] if f"{name}_bias" in p else y


def gated(config, x):
    """Return what gates let through, of gates and values side by side; gpt-oss's take turns."""
    if config.limit:
        gate, up = x[..., ::2], x[..., 1::2]
        gate, up = jnp.minimum(gate, config.limit), jnp.clip(up, -config.limit, config.limit)
        return gate * jax.nn.sigmoid(1.702 * gate) * (up + 1)
    gate, up = jnp.split(x, 2, axis=-1)
    return (jax.nn.gelu(gate, approximate=True) if config.gemma else jax.nn.silu(gate)) * up


def norm(config, scale, x):
    """Return x with a root mean square of 1 along the last axis, times the scale."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + config.epsilon)
    return (wide * scale.astype(jnp.float32)).astype(x.dtype)


def softcapped(x, cap):
    """Return x drawn between -cap and cap by tanh; x itself for a cap of 0."""
    return jnp.tanh(x / cap) * cap if cap else x


def rotations(config, positions, dtype):
    """Return cosines and sines of each base, ``[bases, 2, ..., 1, size / 2]``; layers' bases.

    Args:
        positions: int ``[length]``, or ``[batch, length]``.
    """
    table = np.stack([rope.frequencies(config.head_size) for rope in config.ropes])
    table = table.reshape(len(table), *[1] * (positions.ndim + 1), -1)
    angles = positions.astype(jnp.float32)[..., None, None] * table
    turns = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
    if any(rope.scale != 1 for rope in config.ropes):
        scales = np.asarray([rope.scale for rope in config.ropes], np.float32)
        turns = turns * scales.reshape(-1, *[1] * (turns.ndim - 1))
    return turns.astype(dtype), jnp.asarray(config.rope_of, jnp.int32)


def rotate(x, turns):
    """Turn the two halves of ``[batch, length, heads, size]`` against each other."""
    left, right = jnp.split(x, 2, axis=-1)
    cos, sin = turns
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)
