"""Attention of a few queries over a cache of keys and values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ..batching import widened
from ..op import Op, gradient_of
from ..partition import partition_rows
from .config import Config, prepared
from .reference import attend


def decode_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array | int,
    *,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    mask: jax.Array | None = None,
    index: Any = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    heads_first: bool = True,
) -> jax.Array:
    """Attend with a few queries over a cache of keys and values.

    The softmax is in float32. Nothing is transposed or widened in memory, and what lies beyond the
    length or before the window is not read: a step takes as long as reading what it sees. Queries
    and heads that share keys read them once (Ainslie et al. 2023, arXiv:2305.13245); stretches of
    the cache are shared out over threads, as in Flash-Decoding.

    Args:
        q: float32, bfloat16 or float16 [batch, queries, heads, size].
        keys: the cache [batch, kv_heads, positions, size], float32, bfloat16, float16 or int8.
            ``heads`` is a multiple of ``kv_heads``.
        values: of the shape and dtype of keys.
        length: int32[] or int32[batch], the positions that are filled, those of the queries among
            them.
        key_scale: float32[batch, kv_heads, positions], the scales of the keys of an int8 cache.
        value_scale: the same for its values.
        mask: bool[batch or 1, queries or 1, positions], true where a position is seen, if its
            query sees it by the length.
        index: int32[], which cache of a stack [layers, batch, kv_heads, positions, size] to attend
            over; scales have that axis, too. It is read where it lies, whereas
            ``lax.dynamic_index_in_dim`` copies what it cuts out. A negative one counts from the
            end; beyond the ends it is the end.
        scale: factor of the logits, by default 1 / sqrt(size).
        window: how many positions, up to its own, a query sees; None or 0 for all.
        softcap: logits become softcap * tanh(logits / softcap) (Gemma 2, arXiv:2408.00118); None or
            0 for none.
        causal: whether the last query sees the positions before the length, the one before it one
            less, and so on; else all of them see those before the length.
        heads_first: False for a cache [batch, positions, kv_heads, size], as ``jax.nn`` has it, and
            its scales alike. Heads first reads memory in order.

    Returns:
        As q; zeros for a query that sees nothing. Differentiable with respect to q, and to keys,
        values and scales where they are floats, by the gradient of the reference.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or value than above.
    """
    given = q, keys, values, length, key_scale, value_scale, mask, index
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    options |= {"causal": causal, "heads_first": heads_first}
    config, operands = prepared(*given, **options)
    return _ATTEND(config, *operands).reshape(q.shape)


def _result(config: Config, q: jax.Array, *_: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(q.shape, q.dtype)


def _attributes(config: Config, *_: jax.Array) -> dict[str, Any]:
    return {
        name: np.float64(value) if isinstance(value, float) else value
        for name, value in dataclasses.asdict(config).items()
    }


def _partition(
    config: Config, block: Callable[..., Any], *operands: jax.Array
) -> Callable[..., Any]:
    """Share out sequences and heads of keys."""
    cache = "bks" if config.heads_first else "bsk"
    stack = ["l"] if config.stacked else []
    names = [[*"btkgd"], [*stack, *cache, "d"], [*stack, *cache, "d"], ["b"]]
    if config.scaled:
        names += [[*stack, *cache], [*stack, *cache]]
    if config.masked:
        mask = operands[4 + 2 * config.scaled]
        names += [["b" if mask.shape[0] > 1 else "m", "t" if mask.shape[1] > 1 else "n", "s"]]
    names += [[]] if config.stacked else []
    whole = {*"tgdsmnl"} & {name for one in names for name in one}
    run = functools.partial(block, config)
    return partition_rows(run, names, [[*"btkgd"]], whole)


def _batch(run: Any, config: Config, size: int, in_batched: Any, *operands: jax.Array) -> Any:
    """Merge the mapped axis into the batch."""
    if config.stacked:
        *given, index = operands
        if in_batched[-1] or not all(in_batched[:3]):
            return NotImplemented
        places = [i for i in (1, 2, 4, 5)[: 2 + 2 * config.scaled] if in_batched[i]]
        for i in places:  # of each mapped stack one cache, which is copied
            given[i] = lax.dynamic_index_in_dim(given[i], index, 1, keepdims=False)
        one = dataclasses.replace(config, stacked=False)
        return _batch(run, one, size, in_batched[:-1], *given)
    if not all((*in_batched[:3], *in_batched[4 : 4 + 2 * config.scaled])):
        return NotImplemented
    batch = operands[0].shape[1]

    def merged(x: jax.Array) -> jax.Array:
        if x.shape[1] != batch:  # a mask for all of a batch
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return x.reshape(size * batch, *x.shape[2:])

    out = run(config, *map(merged, widened(size, in_batched, *operands)))
    return out.reshape(size, batch, *out.shape[1:]), True


_ATTEND = Op(
    "decode_attention",
    attend,
    results=_result,
    attributes=_attributes,
    partition=_partition,
    batch=_batch,
    gradient=gradient_of(attend),
)
