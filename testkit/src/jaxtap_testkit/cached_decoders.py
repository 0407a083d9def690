"""Decoders that keep their cache in different ways.

A reference rounds the rows that it writes to what int8 and a float32 scale of each row can hold, in
NumPy's terms, and keeps them in float.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .numbers import normal

L, B, H, S, D = 2, 3, 4, 16, 8
E = H * D
VOCAB = 31


def keep(row):
    """Write a row as it is."""
    return row


def rounded(row):
    """Round a row to multiples of a 127th of its largest element."""
    most = jnp.max(jnp.abs(row), -1, keepdims=True)
    scale = jnp.where(most == 0, 1, most / 127)
    return jnp.round(row / scale) * scale


def parameters(seed=0):
    layers = {name: normal(L, E, E, seed=(seed, i)) / np.sqrt(E) for i, name in enumerate("qkvo")}
    embed = normal(VOCAB, E, seed=(seed, 4))
    head = normal(E, VOCAB, seed=(seed, 5)) / np.sqrt(E)
    return {"layers": layers, "embed": embed, "head": head}


def heads(x):
    """``[B, H, 1, D]``."""
    return x.reshape(-1, 1, H, D).transpose(0, 2, 1, 3)


def attend(q, k, v, seen):
    scores = jnp.einsum("bhqd,bhsd->bhqs", q, k) / np.sqrt(D)
    weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), -1)
    return jnp.einsum("bhqs,bhsd->bhqd", weights, v)


def layer(p, h, k, v, seen, write):
    """Compute one layer, whose cache ``write(cache, row)`` updates."""
    k, keys = write(k, heads(h @ p["k"]))
    v, values = write(v, heads(h @ p["v"]))
    out = attend(heads(h @ p["q"]), keys, values, seen)
    return h + out.transpose(0, 2, 1, 3).reshape(h.shape) @ p["o"], k, v


def over_layers(params, token, cache, seen, write):
    """A step that scans over layers and their caches; see ``layer``."""

    def one(h, both):
        p, k, v = both
        h, k, v = layer(p, h, k, v, seen, write)
        return h, (k, v)

    xs = (params["layers"], cache["k"], cache["v"])
    h, (k, v) = lax.scan(one, params["embed"][token], xs)
    return logits(params, h), {"k": k, "v": v}


def logits(params, h):
    return jax.nn.log_softmax(h @ params["head"])


def empty(*shape):
    return {"k": jnp.zeros(shape), "v": jnp.zeros(shape)}


def until(pos):
    return jnp.arange(S) <= pos


def carry(row):
    """Carry the caches of all layers in a scan over layers."""

    def step(params, token, cache, pos):
        def one(carried, p):
            h, k, v, i = carried

            def write(cache, new):
                cache = lax.dynamic_update_slice(cache, row(new)[None], (i, 0, 0, pos, 0))
                return cache, lax.dynamic_index_in_dim(cache, i, keepdims=False)

            h, k, v = layer(p, h, k, v, until(pos), write)
            return (h, k, v, i + 1), None

        first = (params["embed"][token], cache["k"], cache["v"], 0)
        (h, k, v, _), _ = lax.scan(one, first, params["layers"])
        return logits(params, h), {"k": k, "v": v}

    return step, empty(L, B, H, S, D)


def stacked(row):
    """Step along the caches in a scan over layers."""

    def step(params, token, cache, pos):
        def write(cache, new):
            cache = lax.dynamic_update_slice_in_dim(cache, row(new), pos, axis=2)
            return cache, cache

        return over_layers(params, token, cache, until(pos), write)

    return step, empty(L, B, H, S, D)


def unrolled(row):
    """Keep a dictionary of caches, one per layer, in jitted functions."""

    @jax.jit
    def write_at(cache, new, pos):
        return cache.at[:, pos].set(row(new)[:, :, 0])

    def step(params, token, cache, pos):
        h, new = params["embed"][token], {}
        for i in range(L):
            p = jax.tree.map(lambda x, i=i: x[i], params["layers"])

            def write(cache, row):
                cache = write_at(cache, row, pos)
                return cache, cache.transpose(0, 2, 1, 3)

            held = cache[f"layer_{i}"]
            h, k, v = layer(p, h, held["k"], held["v"], until(pos), write)
            new[f"layer_{i}"] = {"k": k, "v": v}
        return logits(params, h), new

    return step, {f"layer_{i}": empty(B, S, H, D) for i in range(L)}


def ring(row):
    """Keep a sliding window: rows at positions modulo the window."""
    window = S // 4

    def step(params, token, cache, pos):
        seen = jnp.arange(window) <= pos

        def write(cache, new):
            cache = cache.at[:, :, pos % window].set(row(new)[:, :, 0])
            return cache, cache

        return over_layers(params, token, cache, seen, write)

    return step, empty(L, B, H, window, D)


def shifted(row):
    """A sliding window: the oldest row leaves as a new one comes."""
    window = S // 4

    def step(params, token, cache, pos):
        seen = jnp.arange(window) >= window - 1 - pos

        def write(cache, new):
            cache = jnp.concatenate([cache[:, :, 1:], row(new)], 2)
            return cache, cache

        return over_layers(params, token, cache, seen, write)

    return step, empty(L, B, H, window, D)


def selected(row):
    """Write rows by a mask; finished sequences keep their cache."""

    def step(params, token, cache, pos):
        running = jnp.arange(B) != 1
        here = (jnp.arange(S) == pos)[None, None, :, None] & running[:, None, None, None]

        def write(cache, new):
            cache = jnp.where(here, row(new), cache)
            return cache, cache

        return over_layers(params, token, cache, until(pos), write)

    return step, empty(L, B, H, S, D)


def _positions(pos):
    return jnp.maximum(pos - jnp.arange(B), 0)


def vmapped_update(row):
    """Write rows of sequences at different positions by a mapped update."""

    def step(params, token, cache, pos):
        at = _positions(pos)
        seen = (jnp.arange(S) <= at[:, None])[:, None, None]

        def write(cache, new):
            put = jax.vmap(lambda c, r, i: lax.dynamic_update_slice(c, r, (0, i, 0)))
            cache = put(cache, row(new), at)
            return cache, cache

        return over_layers(params, token, cache, seen, write)

    return step, empty(L, B, H, S, D)


def scattered(row):
    """Write rows of sequences at different positions by a scatter."""

    def step(params, token, cache, pos):
        at = _positions(pos)
        seen = (jnp.arange(S) <= at[:, None])[:, None, None]
        places = jnp.where(jnp.arange(B) == 2, S + at, at)

        def write(cache, new):
            cache = cache.at[jnp.arange(B), :, places].set(row(new)[:, :, 0], mode="drop")
            return cache, cache

        return over_layers(params, token, cache, seen, write)

    return step, empty(L, B, H, S, D)


def vmapped_step(row):
    """Map the step of one sequence over sequences."""

    def one_step(params, token, cache, pos):
        def one(carried, p):
            h, k, v, i = carried

            def write(cache, new):
                cache = lax.dynamic_update_slice(cache, row(new), (i, 0, pos, 0))
                return cache, lax.dynamic_index_in_dim(cache, i)

            h, k, v = layer(p, h, k, v, until(pos), write)
            return (h, k, v, i + 1), None

        first = (params["embed"][token][None], cache["k"], cache["v"], 0)
        (h, k, v, _), _ = lax.scan(one, first, params["layers"])
        return logits(params, h)[0], {"k": k, "v": v}

    def step(params, token, cache, pos):
        mapped = jax.vmap(one_step, (None, 0, 0, 0))
        return mapped(params, token, cache, _positions(pos))

    return step, empty(B, L, H, S, D)


def branched(row):
    """Write in a branch, in a while loop over layers."""

    def step(params, token, cache, pos):
        def one(carried):
            i, h, k, v = carried
            p = jax.tree.map(lambda x: x[i], params["layers"])

            def write(cache, new):
                def put(cache):
                    return lax.dynamic_update_slice(cache, row(new)[None], (i, 0, 0, pos, 0))

                cache = lax.cond(pos % 5 == 4, lambda cache: cache, put, cache)
                return cache, lax.dynamic_index_in_dim(cache, i, keepdims=False)

            h, k, v = layer(p, h, k, v, until(pos), write)
            return i + 1, h, k, v

        first = (0, params["embed"][token], cache["k"], cache["v"])
        _, h, k, v = lax.while_loop(lambda carried: carried[0] < L, one, first)
        return logits(params, h), {"k": k, "v": v}

    return step, empty(L, B, H, S, D)


def grouped(row):
    """Two heads of queries share one of keys, which are repeated."""

    def step(params, token, cache, pos):
        def write(cache, new):
            few = row(new[:, ::2])
            cache = lax.dynamic_update_slice_in_dim(cache, few, pos, axis=2)
            return cache, jnp.repeat(cache, 2, axis=1)

        return over_layers(params, token, cache, until(pos), write)

    return step, empty(L, B, H // 2, S, D)


def together(row):
    """Keys and values in one array."""

    def step(params, token, cache, pos):
        def one(h, both):
            p, kv = both
            new = jnp.stack([heads(h @ p["k"]), heads(h @ p["v"])])
            kv = lax.dynamic_update_slice(kv, row(new), (0, 0, 0, pos, 0))
            out = attend(heads(h @ p["q"]), kv[0], kv[1], until(pos))
            return h + out.transpose(0, 2, 1, 3).reshape(h.shape) @ p["o"], kv

        h, kv = lax.scan(one, params["embed"][token], (params["layers"], cache["kv"]))
        return logits(params, h), {"kv": kv}

    return step, {"kv": jnp.zeros((L, 2, B, H, S, D))}


def transposed(row):
    """Keys with their positions last, as some kernels want them."""

    def step(params, token, cache, pos):
        def one(h, both):
            p, k, v = both
            last = cache["v"].ndim - 2

            def put(cache, new, axis):
                return lax.dynamic_update_slice_in_dim(cache, new, pos, axis=axis)

            k = put(k, jnp.swapaxes(row(heads(h @ p["k"])), 2, 3), last)
            v = put(v, row(heads(h @ p["v"])), 2)
            scores = jnp.einsum("bhqd,bhds->bhqs", heads(h @ p["q"]), k) / np.sqrt(D)
            weights = jax.nn.softmax(jnp.where(until(pos), scores, -1e30), -1)
            out = jnp.einsum("bhqs,bhsd->bhqd", weights, v)
            return h + out.transpose(0, 2, 1, 3).reshape(h.shape) @ p["o"], (k, v)

        xs = (params["layers"], cache["k"], cache["v"])
        h, (k, v) = lax.scan(one, params["embed"][token], xs)
        return logits(params, h), {"k": k, "v": v}

    cache = empty(L, B, H, S, D)
    return step, {**cache, "k": jnp.zeros((L, B, H, D, S))}


DECODERS = {
    fn.__name__: fn
    for fn in (
        carry,
        stacked,
        unrolled,
        ring,
        shifted,
        selected,
        vmapped_update,
        scattered,
        vmapped_step,
        branched,
        grouped,
        together,
        transposed,
    )
}
