"""Decoders of families as Llama, Qwen and Gemma, written plainly: functions over a tree.

Kernels of dense layers are ``[in, out]``; those of layers that are alike are stacked, and the
program scans over them. Queries, keys and values are one kernel, as are gate and up, so that a row
is read, and quantized, once. What differs from layer to layer (windows, rotary bases) is data of
the scan. Where layers have other parameters, such as one with attention behind three without, a
step of the scan runs one of each, with the config that ``config.view`` returns for them.

The cache is ``{"k", "v"}``, each ``[layers, batch, kv_heads, positions, head_size]``. The scan
carries it, and each layer writes its new positions where they lie. Layers with other heads have
``"k1"`` and ``"v1"``; those of a gated delta rule have no positions, but ``"state"``, ``[layers,
batch, heads, key_size, value_size]``, and ``"conv"``, the last inputs of their convolution.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .delta import delta


class Where(NamedTuple):
    """Where the tokens of a call are.

    Attributes:
        places: int ``[length]``, or ``[batch, length]``: their positions.
        position: of the first one, behind what a cache holds; None to look at nothing there.
        last: the last one that is not there to fill up a prompt; None for all.
        documents: int ``[batch, length]``, whose document each is of; None for one.
    """

    places: Any
    position: Any = None
    last: Any = None
    documents: Any = None


def logits(config, params, tokens, documents=None, remat=False):
    """Return float32 ``[batch, length, vocabulary]`` for int ``[batch, length]``.

    Args:
        tokens: int ``[batch, length]``.
        documents: int ``[batch, length]``, for rows of several documents, one after the other: the
            number of each token's. A token sees those of its document alone, and positions begin
            with it. None where a row is one document.
        remat: whether gradients compute each layer again instead of keeping what is inside it.
    """
    places = jnp.arange(tokens.shape[1]) if documents is None else places_in(documents)
    where = Where(places, documents=documents)
    return head(config, params, run(config, params, tokens, where, remat=remat)[0])


def prefill(config, params, tokens, cache, last):
    """Run a prompt from position 0 on.

    Args:
        tokens: int ``[batch, length]``; what follows the prompt is overwritten by what is decoded.
        cache: an empty one, of at least as many positions.
        last: int scalar, the position of the prompt's last token.

    Returns:
        The logits behind that, ``[batch, vocabulary]``, and the cache.
    """
    where = Where(jnp.arange(tokens.shape[1]), last=last)
    x, cache = run(config, params, tokens, where, cache)
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
    where = Where(position + jnp.arange(1), position)
    x, cache = run(config, params, tokens[:, None], where, cache)
    return head(config, params, x)[:, 0], cache


def make_cache(config, batch, positions, dtype=jnp.float32):
    """Return an empty cache."""
    cache = {}
    for end, layers in config.cached.items():
        one, count = config.view(layers[0]), len(layers)
        if one.mixer == "delta":
            d = one.delta
            state = count, batch, d.values, d.key_size, d.value_size
            cache["state"] = jnp.zeros(state, jnp.float32)  # sums over all positions
            cache["conv"] = jnp.zeros((count, batch, d.taps - 1, d.width), dtype)
        else:
            shape = count, batch, one.kv_heads, positions, one.head_size
            cache |= {f"{name}{end}": jnp.zeros(shape, dtype) for name in "kv"}
    return cache


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


def run(config, params, tokens, where, cache=None, remat=False):
    """Run all layers on int ``[batch, length]``.

    Args:
        where: the tokens are, a ``Where``.
        cache: None for none.
        remat: as for ``logits``.

    Returns:
        What the head takes, ``[batch, length, width]``, and the cache.
    """
    x = embed(config, params, tokens)
    inputs = layer_inputs(config, params, tokens, x)
    shared = empty_shared(config, x)
    for stacks in config.segments:
        x, cache, shared = run_segment(
            config, stacks, params, x, where, cache, shared, inputs, remat
        )
    return x, cache


def run_segment(config, stacks, params, x, where, cache=None, shared=(), inputs=None, remat=False):
    """Run the layers of stacks in turn, as ``run`` does.

    Args:
        shared: keys and values that later layers attend to, too: see ``empty_shared``.
        inputs: what ``layer_inputs`` returns.

    Returns:
        x, the cache and ``shared``.
    """
    views = [config.view(stack) for stack in stacks]
    turns = [rotations(view, where.places, x.dtype, reach(where, x, cache)) for view in views]
    given = [
        {"p": params[stack.name], **facts(config, stack.layers)}
        | ({} if inputs is None else {"input": inputs[jnp.asarray(stack.layers)]})
        for stack in stacks
    ]

    def layer(carry, given):
        for view, turn, one in zip(views, turns, given, strict=True):

            def run(carry, one, view=view, turn=turn):
                return layer_of(view, one, turn, where, *carry)

            carry = (jax.checkpoint(run) if remat else run)(carry, one)
        return carry, None

    return lax.scan(layer, (x, cache, shared), given)[0]


def facts(config, layers):
    """Return what differs between layers that are alike, each int ``[layers]``.

    These are the window, the place of the rotary positions, and the place in the cache.
    """
    places = {layer: i for of in config.cached.values() for i, layer in enumerate(of)}
    return {
        "window": jnp.asarray([config.windows[i] for i in layers], jnp.int32),
        "rope": jnp.asarray([config.rope_of[i] for i in layers], jnp.int32),
        "place": jnp.asarray([places[config.source(i)] for i in layers], jnp.int32),
    }


def layer_of(config, given, turns, where, x, cache, shared):
    """Return what a layer makes of ``[batch, length, width]``, the cache and ``shared``."""
    p = given["p"]
    with jax.named_scope("attention"):
        y = norm(config, p["attention_norm"], x)
        if config.mixer == "delta":
            y, cache = delta(config, p, y, where, cache, given["place"])
        else:
            y, cache, shared = attention(config, p, y, turns, where, given, cache, shared)
        y = norm(config, p["attention_post_norm"], y) if config.gemma else y
    x = x + y
    with jax.named_scope("mlp"):
        y = norm(config, p["mlp_norm"], x)
        if config.parallel:
            y = norm(config, p["shared_post_norm"], mlp(config, p, y, "shared_"))
            found = experts(config, p, norm(config, p["experts_norm"], x), x)
            y = y + norm(config, p["experts_post_norm"], found)
        elif config.experts:
            found = experts(config, p, y, y)
            y = found + shared_expert(config, p, y) if config.shared_inner else found
        else:
            y = mlp(config, p, y)
        y = norm(config, p["mlp_post_norm"], y) if config.gemma else y
    x = x + y
    if config.layer_input:
        with jax.named_scope("input"):
            y = gelu(dense(p, "input_gate", x)) * given["input"]
            x = x + norm(config, p["input_post_norm"], dense(p, "input_out", y))
    return (x * p["layer_scale"] if config.layer_scales else x), cache, shared


def layer_inputs(config, params, tokens, x):
    """Return what each layer gets of the tokens, ``[layers, batch, length, layer_input]``, or None.

    Args:
        x: their embeddings.
    """
    if not config.layer_input:
        return None
    shape = *tokens.shape, config.layers, config.layer_input
    with jax.named_scope("inputs"):
        own = params["input_embed"][tokens].reshape(shape) * config.layer_input**0.5
        rest = (x @ params["input_project"] * config.width**-0.5).reshape(shape)
    rest = norm(config, params["input_norm"], rest)
    return jnp.moveaxis((own + rest) * 2**-0.5, 2, 0).astype(x.dtype)


def empty_shared(config, x):
    """Return ``{local: (k, v)}``, of layers with and without windows, for those without their own.

    Layers that have keys replace those of before, and the others attend to the last ones.
    """
    shared = {}
    for i in range(config.layers if config.kinds else 0):
        if not config.kinds[i].keeps:
            one = config.view(config.source(i))
            empty = jnp.zeros((*x.shape[:2], one.kv_heads, one.head_size), x.dtype)
            shared[str(one.local)] = empty, empty
    return shared


def places_in(documents):
    """Return the position of each token in its document, int ``[batch, length]``."""
    at = jnp.broadcast_to(jnp.arange(documents.shape[1]), documents.shape)
    before = jnp.pad(documents[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    return at - lax.cummax(jnp.where(documents != before, at, 0), axis=1)


def attention(config, p, x, turns, where, given, cache, shared):
    """Return what attention adds to ``[batch, length, width]``, the cache and ``shared``."""
    batch, length, _ = x.shape
    heads, size = config.heads, config.head_size
    window, rope, i, position = given["window"], given["rope"], given["place"], where.position
    kinds = config.projected_heads
    qkv = dense(p, "qkv", x).reshape(batch, length, sum(kinds), size)
    q, *kv = jnp.split(qkv, np.cumsum(kinds)[:-1], axis=2)
    gate = None
    if config.gated:
        q, gate = jnp.split(q.reshape(batch, length, heads, 2 * size), 2, axis=-1)
    q = tempered(config, turned(config, p, "q", q, turns, rope), where, rope)
    if config.keeps:
        k, v = turned(config, p, "k", kv[0], turns, rope), kv[-1]
        v = unit(config, v) if config.value_norms else v
        if cache is not None:
            at = i, 0, 0, 0 if position is None else position, 0
            cache = cache | {
                name: lax.dynamic_update_slice(cache[name], one.swapaxes(1, 2)[None], at)
                for name, one in (("k" + config.cache_end, k), ("v" + config.cache_end, v))
            }
        if str(config.local) in shared:
            shared = shared | {str(config.local): (k, v)}
    else:
        k, v = shared[str(config.local)]
    if position is not None:
        assert cache is not None
        k, v = (
            lax.dynamic_index_in_dim(cache[name + config.cache_end], i, 0, keepdims=False)
            for name in "kv"
        )
        mask = seen(config, position, length, k.shape[2], window)
        mixed = attend(config, p, q, k, v, mask)
    elif config.softcap or config.sinks:
        k, v = k.swapaxes(1, 2), v.swapaxes(1, 2)
        mask = seen(config, 0, length, length, window, where.documents)
        mixed = attend(config, p, q, k, v, mask)
    else:
        # A function that rules know by name: kernel="fused" runs it in one pass.
        is_plain = where.documents is None and not any(config.windows)
        mask = None if is_plain else seen(config, 0, length, length, window, where.documents)
        mixed = jax.nn.dot_product_attention(
            q, k, v, mask=mask, scale=config.scale, is_causal=mask is None
        )
    mixed = mixed if gate is None else mixed * jax.nn.sigmoid(gate)
    return dense(p, "out", mixed.reshape(batch, length, heads * size)), cache, shared


def turned(config, p, name, x, turns, rope):
    """Return queries or keys with their norms, turned by their positions."""
    x = norm(config, p[f"{name}_norm"], x) if config.head_norms else x
    x = rotate(config, x, turns[rope])
    # Of those that turn alone.
    return jnp.where(stands(config)[rope], x, unit(config, x)) if config.unit_norms else x


def tempered(config, q, where, rope):
    """Return queries, those without positions scaled by how far they are from the first one."""
    if config.tempering is None:
        return q
    floor, factor = config.tempering
    scale = jnp.log1p(jnp.floor((where.places + 1.0) / floor)) * factor + 1
    scale = jnp.where(stands(config)[rope], scale, 1).astype(q.dtype)
    return q * scale[..., None, None]


def stands(config):
    """Return for each of the rotary positions whether nothing turns, bool ``[bases]``."""
    return jnp.asarray([np.isinf(rope.factor) for rope in config.ropes])


def seen(config, position, queries, keys, window, documents=None):
    """Return bool ``[batch or 1, 1, queries, keys]``: which positions a query sees."""
    at, query = jnp.arange(keys), position + jnp.arange(queries)[:, None]
    mask = at <= query
    if any(config.windows) and not config.chunked:
        mask &= (window == 0) | (at > query - window)
    if documents is not None:
        mask = mask & (documents[:, :, None] == documents[:, None])
    if any(config.windows) and config.chunked:
        # Chunks begin with the document.
        places = at if documents is None else places_in(documents)
        chunk = (query if documents is None else places[:, :, None]) // jnp.maximum(window, 1)
        mask = mask & ((window == 0) | (places[..., None, :] // jnp.maximum(window, 1) == chunk))
    return mask[None, None] if documents is None else mask[:, None]


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


def mlp(config, p, x, which=""):
    """Return what the MLP adds to ``[batch, length, width]``; the one beside the experts too."""
    return dense(p, f"{which}down", gated(config, dense(p, f"{which}gate_up", x)))


def shared_expert(config, p, x):
    """Return what the MLP that all tokens go through adds to that of their experts."""
    y = mlp(config, p, x, "shared_")
    if not config.gated_shared:
        return y
    with jax.named_scope("shared_router"):
        return y * jax.nn.sigmoid(x @ p["shared_router"])


def routed(config, p, x):
    """Return the weights of each row's experts, float32 ``[rows, experts of a token]``, and them.

    Args:
        x: ``[rows, width]``.
    """
    if config.parallel:
        x = unit(config, x) * (p["router_scale"] * config.width**-0.5)
    with jax.named_scope("router"):
        scores = biased(p, "router", x @ p["router"]).astype(jnp.float32)
    chances = jax.nn.sigmoid(scores) if config.sigmoid_router else jax.nn.softmax(scores)
    weights, chosen = lax.top_k(chances, config.experts_per_token)
    if config.normalize_experts and not config.sigmoid_router:
        weights = weights / weights.sum(-1, keepdims=True)
    return (weights * p["expert_scale"][chosen] if config.parallel else weights), chosen


def experts(config, p, x, scored):
    """Return the sum of each token's experts: its rows are sorted by expert, and multiplied so.

    Args:
        scored: what they are chosen by, as x.
    """
    rows = x.reshape(-1, x.shape[-1])
    weights, chosen = routed(config, p, scored.reshape(rows.shape))
    chosen = chosen.reshape(-1)
    order = jnp.argsort(chosen, stable=True)
    token, of = order // config.experts_per_token, chosen[order]
    sizes = jnp.bincount(chosen, length=config.experts).astype(jnp.int32)
    given, weights = rows[token], weights.reshape(-1)[order, None].astype(x.dtype)
    if config.sigmoid_router:
        given, weights = given * weights, jnp.ones_like(weights)
    with jax.named_scope("gate_up"):
        inner = biased(p, "gate_up", lax.ragged_dot(given, p["gate_up"], sizes), of)
    with jax.named_scope("down"):
        out = biased(p, "down", lax.ragged_dot(gated(config, inner), p["down"], sizes), of)
    out = out * weights
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
    return (gelu(gate) if config.gemma else jax.nn.silu(gate)) * up


def gelu(x):
    """Return gelu as Gemma has it, by tanh."""
    return jax.nn.gelu(x, approximate=True)


def norm(config, scale, x):
    """Return x with a root mean square of 1 along the last axis, times the scale."""
    return (unit(config, x.astype(jnp.float32)) * scale.astype(jnp.float32)).astype(x.dtype)


def unit(config, x):
    """Return x with a root mean square of 1 along the last axis."""
    wide = x.astype(jnp.float32)
    wide = wide * lax.rsqrt(jnp.square(wide).mean(-1, keepdims=True) + config.epsilon)
    return wide.astype(x.dtype)


def softcapped(x, cap):
    """Return x drawn between -cap and cap by tanh; x itself for a cap of 0."""
    return jnp.tanh(x / cap) * cap if cap else x


def reach(where, x, cache):
    """Return how many positions there may be: an int, or ``[batch, length]`` of documents.

    A cache says so before it is filled: keys that turned by other frequencies than those beside
    them would be wrong. llama.cpp and vLLM do the same.
    """
    if cache is not None:
        return max((array.shape[3] for name, array in cache.items() if name[0] == "k"), default=0)
    if where.documents is None:
        return x.shape[1]
    at = jnp.arange(x.shape[1])
    behind = jnp.pad(where.documents[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
    last = jnp.where(where.documents != behind, at, x.shape[1])
    return where.places + lax.cummin(last, axis=1, reverse=True) - at + 1


def rotations(config, positions, dtype, reach):
    """Return cosines and sines of each base, ``[bases, 2, ..., 1, pairs]``.

    Args:
        positions: int ``[length]``, or ``[batch, length]``.
        dtype: of what is returned.
        reach: see the function of that name.
    """
    size, ones = config.head_size, [1] * (positions.ndim + 1)
    near, far = (
        np.stack([rope.frequencies(size, is_long) for rope in config.ropes]).reshape(
            len(config.ropes), *ones, -1
        )
        for is_long in (False, True)
    )
    table = near
    if any(rope.longrope for rope in config.ropes):
        lengths = np.asarray([rope.length for rope in config.ropes]).reshape(-1, *ones, 1)
        table = jnp.where(jnp.asarray(reach)[..., None, None] > lengths, far, near)
    angles = positions.astype(jnp.float32)[..., None, None] * table
    turns = jnp.stack([jnp.cos(angles), jnp.sin(angles)], axis=1)
    if any(rope.scale != 1 for rope in config.ropes):
        scales = np.asarray([rope.scale for rope in config.ropes], np.float32)
        turns = turns * scales.reshape(-1, *[1] * (turns.ndim - 1))
    return turns.astype(dtype)


def rotate(config, x, turns):
    """Turn pairs of ``[batch, length, heads, size]``: of the two halves, or of neighbours.

    What is behind the pairs that turn stays as it is.
    """
    cos, sin = turns
    x, rest = jnp.split(x, [2 * cos.shape[-1]], axis=-1)
    if config.interleaved:
        left, right = x[..., ::2], x[..., 1::2]
    else:
        left, right = jnp.split(x, 2, axis=-1)
    new = [left * cos - right * sin, right * cos + left * sin]
    if config.interleaved:
        return jnp.stack(new, axis=-1).reshape(x.shape)
    return jnp.concatenate([*new, rest], axis=-1) if rest.size else jnp.concatenate(new, axis=-1)
