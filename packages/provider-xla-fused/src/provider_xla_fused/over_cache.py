"""Attention over a cache: kernels read it where it lies.

A kernel reads a cache that is carried as int8 as quantized values and scales. It reads a cache that
the program transposes for its attention in the order that it has in memory, and one that the
program takes out of the caches of all layers, by an index, in their stack. Otherwise XLA would copy
the cache for the kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import quant_numerics as qn
from hijax_trace import is_same, unsliced, untransposed
from interception_core import OpCall

ATTENTION = "decode_attention"
"""The op that reads stacks of caches, and int8 ones with a scale for each head and position."""


def over_cache(
    call: OpCall, name: str, arrays: Sequence[Any], op: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the attention op for caches of quantized keys and values.

    Arrays are queries, keys and values, ``[..., length, heads, size]``. Only ``ATTENTION`` reads
    caches where they lie; ``op`` computes attention of floats, ``[batch, length, heads, size]``, or
    of int8 with scales.
    """
    if name != ATTENTION:
        return op
    caches = [call.proxy(array) for array in arrays[1:]]
    is_int8 = all(map(_is_read, caches))
    if not is_int8 and any(cache is not None for cache in caches):
        return op
    names = ("qvalue", "scale") if is_int8 else ()
    parts = [getattr(cache, name) for name in names for cache in caches] or list(arrays[1:])
    lying = list(map(_lying, parts))
    # A kernel takes keys, values and scales in one order. If they differ, the program's is used.
    if len({one.heads_first for one in lying}) > 1:
        lying = [_Lying(part, False, unsliced(part)) for part in parts]
    heads_first, stack = lying[0].heads_first, _stack(lying)
    if not (is_int8 or heads_first or stack):
        return op
    index, held = stack or (None, [one.array for one in lying])
    lead = 0 if index is None else 1
    keys, values = (x.reshape(*x.shape[:lead], -1, *x.shape[-3:]) for x in held[:2])
    given: dict[str, Any] = {"heads_first": heads_first}
    if index is not None:
        given["index"] = index
    if is_int8:
        scales = (_scale(x, of, lead) for x, of in zip(held[2:], held[:2], strict=True))
        given |= dict(zip(("key_scale", "value_scale"), scales, strict=True))

    def attend(query: Any, key: Any, value: Any, length: Any, **options: Any) -> Any:
        return op(query, keys, values, length, **{**options, **given})

    return attend


def _is_read(cache: Any) -> bool:
    """Return whether the kernel reads a cache: int8, scales per head and position."""
    if not isinstance(cache, qn.QArray) or cache.qvalue.dtype != jnp.int8:
        return False
    if cache.zero_point is not None or cache.scale.dtype != jnp.float32:
        return False
    return cache.scale.shape[-1] == 1 or cache.shape[-1] == 1


class _Lying(NamedTuple):
    """A part of a cache as it lies in memory.

    Attributes:
        array: ``[..., heads, positions, size]`` or ``[..., positions, heads, size]``.
        heads_first: which of the two.
        stack: the array whose first axis it is an index of, and that index; None without one.
    """

    array: Any
    heads_first: bool
    stack: tuple[Any, Any] | None


def _lying(part: Any) -> _Lying:
    """Return ``[..., positions, heads, size]`` as it lies in memory."""
    array, order = untransposed(part)
    rank = len(order)
    heads_first = order == (*range(rank - 3), rank - 2, rank - 3, rank - 1)
    array = array if heads_first else part
    return _Lying(array, heads_first, unsliced(array))


def _stack(lying: Sequence[_Lying]) -> tuple[Any, list[Any]] | None:
    """Return the index of a cache in stacks, and these, or None."""
    if any(one.stack is None for one in lying):
        return None
    stacks = [one.stack for one in lying if one.stack is not None]
    _, index = stacks[0]
    # Scales that heads or positions share would have to be repeated for all layers.
    whole = all(one.array.shape[:-1] == lying[0].array.shape[:-1] for one in lying)
    if not whole or not all(is_same(index, other) for _, other in stacks):
        return None
    return index, [stack for stack, _ in stacks]


def _scale(scale: jax.Array, values: jax.Array, lead: int) -> jax.Array:
    """Return scales with one batch axis after the ``lead`` ones."""
    rows = jnp.broadcast_to(scale[..., 0], values.shape[:-1])
    return rows.reshape(*rows.shape[:lead], -1, *rows.shape[-2:])
