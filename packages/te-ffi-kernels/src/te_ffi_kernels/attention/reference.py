"""Attention and its gradients in plain JAX, with all scores in memory."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .config import Config, Sizes
from .operands import Sequences
from .types import AttnBiasType, AttnSoftmaxType

Arrays = tuple[jax.Array, ...]
Words = tuple[jax.Array, jax.Array, jax.Array, jax.Array]


@dataclasses.dataclass(frozen=True)
class Places:
    """Tokens' segments (-1: none) and positions [b, s], and segment lengths."""

    q_segment: jax.Array
    kv_segment: jax.Array
    q_place: jax.Array
    kv_place: jax.Array
    q_lengths: jax.Array
    kv_lengths: jax.Array


def separate(qkv: Arrays) -> Arrays:
    """Return queries, keys and values, in float32."""
    if len(qkv) == 1:
        qkv = tuple(qkv[0][:, :, i] for i in range(3))
    elif len(qkv) == 2:
        qkv = (qkv[0], qkv[1][:, :, 0], qkv[1][:, :, 1])
    return tuple(array.astype(jnp.float32) for array in qkv)


def together(grads: Arrays, count: int) -> Arrays:
    """Return gradients of queries, keys and values as those of `count` arrays."""
    if count == 1:
        return (jnp.stack(grads, axis=2),)
    return (grads[0], jnp.stack(grads[1:], axis=2)) if count == 2 else grads


def places(config: Config, sizes: Sizes, sequences: Sequences) -> Places:
    """Return where tokens are."""
    q_lengths, kv_lengths, q_starts, kv_starts = sequences
    found = []
    for lengths, starts, length in (
        (q_lengths, q_starts, sizes.q_length),
        (kv_lengths, kv_starts, sizes.kv_length),
    ):
        shape = (sizes.batch, length)
        if not config.layout.is_thd():
            place = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32)[None], shape)
            number = jnp.broadcast_to(jnp.arange(sizes.batch, dtype=jnp.int32)[:, None], shape)
            found.append((jnp.where(place < lengths[:, None], number, -1), place))
            continue
        token = jnp.arange(sizes.batch * length, dtype=jnp.int32)
        inside = (token[:, None] >= starts[None]) & (token[:, None] < (starts + lengths)[None])
        number = jnp.argmax(inside, axis=1).astype(jnp.int32)
        number = jnp.where(inside.any(axis=1), number, -1)
        found.append((number.reshape(shape), (token - starts[number]).reshape(shape)))
    (q_segment, q_place), (kv_segment, kv_place) = found
    return Places(q_segment, kv_segment, q_place, kv_place, q_lengths, kv_lengths)


def visible(config: Config, at: Places) -> jax.Array:
    """Return which keys each query sees, [b, 1, sq, skv]."""
    same = (at.q_segment[:, :, None] == at.kv_segment[:, None, :]) & (at.q_segment >= 0)[..., None]
    distance = at.kv_place[:, None, :] - at.q_place[:, :, None]
    if config.mask_type.is_bottom_right():
        distance -= (at.kv_lengths - at.q_lengths)[at.q_segment][:, :, None]
    left, right = config.window_size
    if left >= 0:
        same &= distance >= -left
    if config.mask_type.is_causal():
        right = 0
    if right >= 0:
        same &= distance <= right
    return same[:, None]


def kept(config: Config, at: Places, heads: int, random: jax.Array) -> jax.Array:
    """Return dropout factors [b, heads, sq, skv] for seed and offset, uint32[4]."""
    shape = (at.q_place.shape[0], heads, at.q_place.shape[1], at.kv_place.shape[1])
    place = at.kv_place[:, None, None, :]
    head = jnp.arange(heads, dtype=jnp.int32)[None, :, None, None]
    counter = tuple(
        jnp.broadcast_to(word.astype(jnp.uint32), shape)
        for word in (
            place >> 2,
            at.q_place[:, None, :, None],
            at.q_segment[:, None, :, None] * heads + head,
            random[2].reshape(1, 1, 1, 1),
        )
    )
    words = philox((counter[0], counter[1], counter[2], counter[3]), (random[0], random[1]))
    word = lax.select_n(jnp.broadcast_to(place & 3, shape), *words)
    threshold = min(int(float(np.float32(config.dropout)) * 2**32), 2**32 - 1)
    keep = 1 / (1 - np.float32(config.dropout))
    return jnp.where(word >= jnp.uint32(threshold), keep, jnp.float32(0))


def philox(counter: Words, key: tuple[jax.Array, jax.Array]) -> Words:
    """Return four random uint32 words for a counter of four, as the kernel draws them.

    Philox 4x32-10 (Salmon et al. 2011).
    """
    c0, c1, c2, c3 = counter
    key0, key1 = key
    for _ in range(10):
        high0, low0 = _product(0xD2511F53, c0)
        high1, low1 = _product(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ key0, low1, high0 ^ c3 ^ key1, low0
        key0 = key0 + jnp.uint32(0x9E3779B9)
        key1 = key1 + jnp.uint32(0xBB67AE85)
    return c0, c1, c2, c3


def _product(factor: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return the high and low half of a 64-bit product."""
    high, low = jnp.uint32(factor >> 16), jnp.uint32(factor & 0xFFFF)
    x_high, x_low = x >> 16, x & jnp.uint32(0xFFFF)
    middle = low * x_high + ((low * x_low) >> 16)
    carry = high * x_low + (middle & jnp.uint32(0xFFFF))
    return high * x_high + (middle >> 16) + (carry >> 16), jnp.uint32(factor) * x


def scores(config: Config, q: jax.Array, k: jax.Array, bias: jax.Array) -> jax.Array:
    """Return scaled scores [b, h, sq, skv]."""
    found = jnp.einsum("bihd,bjhd->bhij", q, k, precision="highest")
    scale = jnp.float32(config.scaling_factor)
    if config.bias_type is AttnBiasType.PRE_SCALE_BIAS:
        return (found + bias.astype(jnp.float32)) * scale
    if config.bias_type is AttnBiasType.POST_SCALE_BIAS:
        return found * scale + bias.astype(jnp.float32)
    return found * scale


def spread(x: jax.Array, heads: int) -> jax.Array:
    """Repeat each head of [b, s, g, d] for its query heads."""
    return jnp.repeat(x, heads // x.shape[2], axis=2)


def forward(
    config: Config,
    sizes: Sizes,
    qkv: Arrays,
    bias: jax.Array,
    offset: jax.Array,
    random: jax.Array,
    sequences: Sequences,
) -> tuple[jax.Array, jax.Array]:
    """Return the result, and the log-sum-exp."""
    q, k, v = separate(qkv)
    at = places(config, sizes, sequences)
    sees = visible(config, at)
    s = jnp.where(sees, scores(config, q, spread(k, sizes.heads), bias), -jnp.inf)
    top = jnp.max(s, axis=-1, keepdims=True, initial=-jnp.inf)
    has_sink = config.softmax_type is not AttnSoftmaxType.VANILLA_SOFTMAX
    if has_sink:
        top = jnp.maximum(top, offset)
    base = lax.stop_gradient(jnp.where(top == -jnp.inf, 0, top))
    total = jnp.sum(jnp.exp(s - base), axis=-1, keepdims=True)
    if has_sink:
        total += jnp.exp(offset - base)
    aux = jnp.where(total == 0, -jnp.inf, base + jnp.log(jnp.where(total == 0, 1, total)))
    p = jnp.exp(s - base) / jnp.where(total == 0, 1, total)
    if config.dropout > 0:
        p *= kept(config, at, sizes.heads, random)
    out = jnp.einsum("bhij,bjhd->bihd", p, spread(v, sizes.heads), precision="highest")
    aux = jnp.where((at.q_segment >= 0)[:, None, :, None], aux, -jnp.inf)
    if config.layout.is_thd():
        aux = aux.swapaxes(1, 2)
    return out.astype(qkv[0].dtype), aux


def backward(
    config: Config,
    sizes: Sizes,
    qkv: Arrays,
    bias: jax.Array,
    offset: jax.Array,
    aux: jax.Array,
    random: jax.Array,
    out: jax.Array,
    out_grad: jax.Array,
    sequences: Sequences,
) -> tuple[Arrays, jax.Array, jax.Array]:
    """Return gradients of the arrays, of the bias and of the offset."""
    q, k, v = separate(qkv)
    dtype, heads, groups = qkv[0].dtype, sizes.heads, sizes.kv_heads
    at = places(config, sizes, sequences)
    sees = visible(config, at)
    if config.layout.is_thd():
        aux = aux.swapaxes(1, 2)
    wide, grad = spread(k, heads), out_grad.astype(jnp.float32)
    some = aux != -jnp.inf
    s = scores(config, q, wide, bias)
    p = jnp.where(sees & some, jnp.exp(s - jnp.where(some, aux, 0)), 0)
    dp = jnp.einsum("bihd,bjhd->bhij", grad, spread(v, heads), precision="highest")
    factors = p
    if config.dropout > 0:
        keep = kept(config, at, heads, random)
        factors, dp = p * keep, dp * keep
    # This is sum(p * dp) over keys. From the output it takes no array of queries by keys.
    delta = jnp.sum(grad * out.astype(jnp.float32), axis=-1).swapaxes(1, 2)[..., None]
    ds = p * (dp - delta)
    scale = jnp.float32(config.scaling_factor)

    def gathered(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], groups, heads // groups, x.shape[3]).sum(axis=3)

    grads = (
        jnp.einsum("bhij,bjhd->bihd", ds, wide, precision="highest") * scale,
        gathered(jnp.einsum("bhij,bihd->bjhd", ds, q, precision="highest") * scale),
        gathered(jnp.einsum("bhij,bihd->bjhd", factors, grad, precision="highest")),
    )
    bias_grad = jnp.zeros_like(bias)
    if config.bias_type is not AttnBiasType.NO_BIAS:
        over = tuple(i for i in (0, 1) if bias.shape[i] == 1 and ds.shape[i] != 1)
        factor = scale if config.bias_type is AttnBiasType.PRE_SCALE_BIAS else jnp.float32(1)
        bias_grad = (jnp.sum(ds, axis=over, keepdims=True) * factor).astype(bias.dtype)
        bias_grad = bias_grad.reshape(bias.shape)
    offset_grad = jnp.zeros_like(offset)
    if config.softmax_type is not AttnSoftmaxType.VANILLA_SOFTMAX:
        sink = jnp.where(some, jnp.exp(offset - jnp.where(some, aux, 0)), 0)
        offset_grad = -jnp.sum(sink * delta, axis=(0, 2), keepdims=True)
    together_grads = together(grads, len(qkv))
    return tuple(one.astype(dtype) for one in together_grads), bias_grad, offset_grad
