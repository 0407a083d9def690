"""The arguments of ``decode_attention``, checked."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp

from ..checks import FLOATS


@dataclasses.dataclass(frozen=True)
class Config:
    """The static arguments of ``decode_attention``. Hashable.

    Attributes:
        scale: factor of the logits.
        softcap: soft limit of the scaled logits, 0 for none.
        window: number of positions that a query sees, 0 for all.
        scaled: whether the cache has scales.
        masked: whether there is a mask.
        causal: whether a query can't see the positions of later queries.
        heads_first: whether the cache is [b, k, s, d], and not [b, s, k, d].
        stacked: whether the cache is one of a stack; its index is the last operand.
    """

    scale: float
    softcap: float
    window: int
    scaled: bool
    masked: bool
    causal: bool
    heads_first: bool
    stacked: bool


def prepared(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: Any,
    key_scale: jax.Array | None,
    value_scale: jax.Array | None,
    mask: jax.Array | None,
    index: Any,
    *,
    scale: float | None,
    window: int | None,
    softcap: float | None,
    causal: bool,
    heads_first: bool,
) -> tuple[Config, tuple[jax.Array, ...]]:
    """Check the arguments of ``decode_attention``.

    Returns:
        What is known at compile time, and the operands of the kernel: q [b, t, k, g, d], keys and
        values [b, k, s, d] or [b, s, k, d], lengths int32[b]; where the cache has scales, those of
        keys and values, float32; where there is one, the mask bool[b or 1, t or 1, s]; where the
        cache is one of a stack, with an axis more, its index int32[].
    """
    stack = () if index is None else _stack(keys, index)
    rank = 4 + len(stack)
    for name, given, wanted in (("q", q, 4), ("keys", keys, rank), ("values", values, rank)):
        if given.ndim != wanted:
            raise ValueError(f"decode_attention: {name} must have {wanted} axes, got {given.shape}")
    if q.dtype not in FLOATS:
        raise TypeError(f"decode_attention: q must be float32, bfloat16 or float16, got {q.dtype}")
    if keys.dtype not in (*FLOATS, jnp.int8) or values.dtype != keys.dtype:
        raise TypeError(
            "decode_attention: keys and values must both be float32, bfloat16, float16 or int8, "
            f"got {keys.dtype} and {values.dtype}"
        )
    batch, queries, heads, size = q.shape
    kv_heads, positions = keys.shape[-3:-1] if heads_first else keys.shape[-2:-4:-1]
    if (keys.shape[-4], keys.shape[-1]) != (batch, size) or values.shape != keys.shape:
        axes = "kv_heads, positions" if heads_first else "positions, kv_heads"
        raise ValueError(
            f"decode_attention: keys and values must be [{'layers, ' if stack else ''}batch, "
            f"{axes}, size] with the batch and "
            f"size of q {q.shape}, got {keys.shape} and {values.shape}"
        )
    if kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"decode_attention: the heads of q must be a multiple of those of keys, got {heads} "
            f"and {kv_heads}"
        )
    scales = _scales(keys, key_scale, value_scale)
    config = Config(
        scale=float(1 / math.sqrt(max(size, 1)) if scale is None else scale),
        softcap=float(_at_least_0("softcap", softcap)),
        window=int(_at_least_0("window", window)),
        scaled=bool(scales),
        masked=mask is not None,
        causal=bool(causal),
        heads_first=bool(heads_first),
        stacked=bool(stack),
    )
    grouped = q.reshape(batch, queries, kv_heads, heads // kv_heads, size)
    rest = () if mask is None else (_mask(mask, batch, queries, positions),)
    return config, (grouped, keys, values, _lengths(length, batch), *scales, *rest, *stack)


def _stack(keys: jax.Array, index: Any) -> tuple[jax.Array]:
    """Check and return the index of a cache in a stack."""
    if jnp.shape(index) != () or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
        found = jax.typeof(jnp.asarray(index))
        raise TypeError(f"decode_attention: index must be a scalar integer, got {found}")
    if keys.ndim and keys.shape[0] == 0:
        raise ValueError(
            "decode_attention: a stack of caches must have one or more where there is an index, "
            f"got {keys.shape}"
        )
    return (jnp.asarray(index, jnp.int32),)


def _scales(keys: jax.Array, *scales: jax.Array | None) -> tuple[jax.Array, ...]:
    given = [scale for scale in scales if scale is not None]
    if (keys.dtype == jnp.int8) != (len(given) == 2) or len(given) == 1:
        raise ValueError(
            "decode_attention: an int8 cache must have key_scale and value_scale, and another "
            f"none, got {keys.dtype} with {len(given)} of them"
        )
    for scale in given:
        if scale.dtype != jnp.float32 or scale.shape != keys.shape[:-1]:
            raise ValueError(
                f"decode_attention: a scale must be float32{list(keys.shape[:-1])}, one for each "
                f"head and position, got {scale.dtype}{list(scale.shape)}"
            )
    return tuple(given)


def _lengths(length: Any, batch: int) -> jax.Array:
    shape = jnp.shape(length)
    if shape not in ((), (batch,)) or not jnp.issubdtype(jnp.result_type(length), jnp.integer):
        raise ValueError(
            f"decode_attention: length must be an integer, or {batch} of them, one for each "
            f"sequence, got {jax.typeof(jnp.asarray(length))}"
        )
    return jnp.broadcast_to(jnp.asarray(length, jnp.int32), (batch,))


def _mask(mask: jax.Array, batch: int, queries: int, positions: int) -> jax.Array:
    fits = mask.ndim == 3 and mask.shape[0] in (1, batch) and mask.shape[1] in (1, queries)
    if mask.dtype != jnp.bool_ or not fits or mask.shape[2] != positions:
        raise ValueError(
            f"decode_attention: mask must be bool[{batch} or 1, {queries} or 1, {positions}], true "
            f"where a position is seen, got {mask.dtype}{list(mask.shape)}"
        )
    return mask


def _at_least_0(name: str, value: float | None) -> float:
    if value is not None and not (0 <= value < math.inf):
        raise ValueError(f"decode_attention: {name} must be at least 0 and finite, got {value}")
    return value or 0
