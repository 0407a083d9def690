"""Attention over an int8 cache: kernels read values and scales."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import quant_numerics as qn
from hijax_trace import untransposed
from interception_core import OpCall

ATTENTION = "decode_attention"
"""The op that reads int8 caches with one scale for each head and position."""


def over_cache(call: OpCall, arrays: Sequence[Any], op: Callable[..., Any]) -> Callable[..., Any]:
    """Return the attention op for caches of quantized keys and values.

    Args:
        call: the call.
        arrays: queries, keys and values, ``[..., length, heads, size]``.
        op: computes attention of floats, ``[batch, length, heads, size]``, or of int8 with scales.
    """
    caches = [call.proxy(array) for array in arrays[1:]]
    if not all(map(_is_read, caches)):
        return op
    is_transposed = all(map(_has_heads_first, caches))
    (keys, key_scale), (values, value_scale) = (_flat(one, is_transposed) for one in caches)

    def attend(query: Any, key: Any, value: Any, length: Any, **options: Any) -> Any:
        options |= {"key_scale": key_scale, "value_scale": value_scale}
        return op(query, keys, values, length, **{**options, "heads_first": is_transposed})

    return attend


def _has_heads_first(cache: qn.QArray) -> bool:
    """Return whether a cache has heads before positions in memory."""
    rank = len(cache.shape)
    return untransposed(cache.qvalue)[1] == (*range(rank - 3), rank - 2, rank - 3, rank - 1)


def _is_read(cache: Any) -> bool:
    """Return whether the kernel reads a cache: int8, scales per head and position."""
    if not isinstance(cache, qn.QArray) or cache.qvalue.dtype != jnp.int8:
        return False
    if cache.zero_point is not None or cache.scale.dtype != jnp.float32:
        return False
    return cache.scale.shape[-1] == 1 or cache.shape[-1] == 1


def _flat(cache: qn.QArray, is_transposed: bool) -> tuple[jax.Array, jax.Array]:
    """Return values and scales with one batch axis, in memory order."""
    values, scale = cache.qvalue, cache.scale
    if is_transposed:
        values, scale = jnp.swapaxes(values, -2, -3), jnp.swapaxes(scale, -2, -3)
    positions = jnp.broadcast_to(scale[..., 0], values.shape[:-1])
    rows = values.shape[-3:]
    return values.reshape(-1, *rows), positions.reshape(-1, *rows[:-1])
