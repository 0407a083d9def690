"""Attention of frameworks and programs, also over a cache, read as kernels' ops."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import quant_numerics as qn
from hijax_trace import is_same, shared_array, unsliced, untransposed
from interception_core import OpCall
from provider_xla.features import StaysFloat

from .patterns.attention import Attention

ATTENTION = "fused_attn_forward"
"""The op of attention."""
DECODE = "decode_attention"
"""The op that reads stacks of caches, and int8 ones with a scale for each head and position."""
WRITTEN = "provider_xla_fused.attention"
"""The target of an attention that a program writes out as contractions and a softmax."""

_FEW_QUERIES = 8
"""The most queries of decoding, where attention takes as long as reading keys and values does."""


def of_jax(given: dict[str, Any]) -> Any:
    """Read a call of ``jax.nn.dot_product_attention``: see ``FusedOp.reader``."""
    if given.get("query_seq_lengths") is not None:
        raise StaysFloat("query_seq_lengths is given")
    if given.get("return_residual"):
        raise StaysFloat("the residual is asked for")
    window = given.get("local_window_size")
    if isinstance(window, int):
        window = (window, window)
    return _attention(
        given["query"],
        given["key"],
        given["value"],
        given["bias"],
        given["mask"],
        given["scale"],
        causal=given["is_causal"],
        window=window,
        lengths=given.get("key_value_seq_lengths"),
    )


def of_flax(given: dict[str, Any]) -> Any:
    """Read a call of flax's ``dot_product_attention``: see ``FusedOp.reader``."""
    if given["dropout_rate"] and not given["deterministic"]:
        raise StaysFloat("it drops out")
    for name in ("module", "qk_attn_weights_einsum", "attn_weights_value_einsum"):
        if given.get(name) is not None:
            raise StaysFloat(f"{name} is given")
    query = given["query"]
    if given["dtype"] is not None and jnp.dtype(given["dtype"]) != query.dtype:
        raise StaysFloat(f"dtype is another than the {query.dtype} of query")
    if given.get("is_causal") and given["mask"] is not None:
        raise StaysFloat("is_causal and a mask are given")
    return _attention(
        query,
        given["key"],
        given["value"],
        given["bias"],
        given["mask"],
        None,
        causal=bool(given.get("is_causal")),
    )


def of_written(given: dict[str, Any]) -> Any:
    """Read an attention that a program writes out: see ``FusedOp.reader``."""
    written, values, also_used = given["written"], given["values"], given["also_used"]
    if also_used:
        raise StaysFloat(f"the program uses {' and '.join(also_used)} elsewhere")
    query, key, value, bias, mask = written.operands(*values)
    causal = written.is_causal
    if causal and (mask is not None or written.softcap is not None):
        rows = jnp.tri(query.shape[1], dtype=bool)
        mask, causal = rows if mask is None else mask & rows, False
        mask = mask[(None,) * (4 - mask.ndim)]
    if mask is not None and written.fills:
        # A query that sees no key gets the mean of all values, as if all scores were zero.
        empty = ~mask.any(-1, keepdims=True)
        mask, bias = mask | empty, None if bias is None else jnp.where(empty, 0, bias)
        query = jnp.where(empty.transpose(0, 2, 1, 3), 0, query)
    if bias is not None:
        # Kernels take a bias in the dtype of queries, which may be narrower than the bias is.
        dtype = jnp.result_type(query, *written.bias_dtypes)
        query, key, value = (x.astype(dtype) for x in (query, key, value))
    options: dict[str, Any] = {"causal": causal, "softcap": written.softcap}
    arrays, run, *other = _attention(query, key, value, bias, mask, written.scale, **options)
    return arrays, lambda op: written.result(run(op), *values), *other


def leaves(given: Mapping[str, Any], are_weights: Sequence[bool]) -> bool:
    """Return whether an operand of an attention is a parameter: rules match its parts."""
    written: Attention = given["written"]
    return any(bool(places) and all(are_weights[i] for i in places) for places in written.places)


def _attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any,
    mask: Any,
    scale: float | None,
    *,
    causal: bool,
    window: Sequence[int] | None = None,
    lengths: Any = None,
    softcap: float | None = None,
) -> Any:
    """Attend over ``[..., length, heads, size]`` with the leading axes as batch."""
    arrays = (query, key, value)
    if any(getattr(x, "ndim", 0) < 3 for x in arrays) or len({x.ndim for x in arrays}) != 1:
        raise StaysFloat("query, key and value have other axes than length, heads and size")
    if len({x.shape[:-3] for x in arrays}) != 1 or len({x.dtype for x in arrays}) != 1:
        raise StaysFloat("query, key and value have different batches or dtypes")
    (length, heads, size), keys = query.shape[-3:], key.shape[-3]
    batch = query.shape[:-3]
    scale = size**-0.5 if scale is None else float(scale)
    seen = _seen(mask, batch, keys)
    few = length <= _FEW_QUERIES and value.shape == key.shape and not causal and window is None
    if few and bias is None and (mask is None or seen is not None):
        run = functools.partial(_decode, arrays, seen, scale, lengths, softcap)
        return arrays, run, DECODE
    if softcap is not None:
        raise StaysFloat(f"its scores are capped, and kernels do that for {_FEW_QUERIES} queries")
    if lengths is not None:
        raise StaysFloat("key_value_seq_lengths is given")
    added = _scores(bias, mask, batch, (heads, length, keys), query.dtype)
    together = _together(arrays)

    def run(op: Callable[..., Any]) -> jax.Array:
        # By Transformer Engine's names: three arrays of [batch, sequence, heads, size], or one of
        # [batch, sequence, 3, heads, size].
        layout, qkv = "BS3HD", (together,)
        if together is None:
            layout = "BSHD_BSHD_BSHD"
            qkv = tuple(x.reshape(math.prod(batch), *x.shape[-3:]) for x in arrays)
        kind = "NO_BIAS" if added is None else "POST_SCALE_BIAS"
        mask_type = "CAUSAL_MASK" if causal else "NO_MASK"
        names = (kind, mask_type, layout, "VANILLA_SOFTMAX")
        out = op(qkv, added, None, None, *names, scale, 0.0, False, window_size=window)
        return out.reshape(*batch, length, heads, value.shape[-1])

    return arrays, run


def _together(arrays: Sequence[jax.Array]) -> jax.Array | None:
    """Return queries, keys and values ``[batch, length, 3, heads, size]`` as the program has them.

    None if the program does not cut them out of one array, in this order.
    """
    shape = arrays[0].shape
    found = shared_array(arrays) if len({x.shape for x in arrays}) == 1 else None
    if found is None or any(part is not None for part in jax.typeof(found[0]).sharding.spec):
        return None
    source, lying = found
    *batch, length, heads, size = shape
    each = heads * size
    rows = [3 * each * math.prod(shape[axis + 1 : -2]) for axis in range(len(batch) + 1)]
    strides = (*rows, size, 1)
    same = [
        all(n == 1 or a == b for n, a, b in zip(shape, one.strides, strides, strict=True))
        for one in lying
    ]
    offsets = [one.offset for one in lying]
    if source.size != 3 * arrays[0].size or not all(same) or offsets != [0, each, 2 * each]:
        return None
    return source.reshape(math.prod(batch), length, 3, heads, size)


def _decode(
    arrays: Sequence[jax.Array],
    seen: Any,
    scale: float,
    lengths: Any,
    softcap: float | None,
    op: Callable[..., Any],
) -> jax.Array:
    """Attend with a few queries, as over a cache."""
    query, key, value = (x.reshape(-1, *x.shape[-3:]) for x in arrays)
    filled = key.shape[1] if lengths is None else lengths
    options: dict[str, Any] = {"scale": scale, "softcap": softcap, "causal": False}
    out = op(query, key, value, filled, mask=seen, heads_first=False, **options)
    return out.reshape(arrays[0].shape)


def _seen(mask: Any, batch: Sequence[int], keys: int) -> jax.Array | None:
    """Return a mask that all heads share as ``[batch, length, keys]``, else None.

    The first two sizes may be 1.
    """
    if mask is None or mask.ndim != len(batch) + 3 or mask.shape[-3] != 1:
        return None
    shape, leading = mask.shape[-2:], mask.shape[: len(batch)]
    flat = 1 if all(n == 1 for n in leading) else math.prod(batch)
    if flat != 1:
        mask = jnp.broadcast_to(mask, (*batch, 1, *shape))
    mask = mask.astype(bool).reshape(flat, *shape)
    return jnp.broadcast_to(mask, (flat, shape[0], keys))


def _scores(
    bias: Any, mask: Any, batch: Sequence[int], shape: tuple[int, int, int], dtype: Any
) -> jax.Array | None:
    """Return the bias of scores, ``[1 or batch, 1 or heads, length, keys]``."""
    if bias is None and mask is None:
        return None
    parts = [part for part in (bias, mask) if part is not None]
    if any(part.ndim != len(batch) + 3 for part in parts):
        raise StaysFloat("its bias or mask has other axes than the scores")
    added = jnp.zeros((), dtype) if bias is None else bias.astype(dtype)
    if mask is not None:
        added = jnp.where(mask.astype(bool), added, jnp.asarray(-jnp.inf, dtype))
    leading, (heads, *rest) = added.shape[: len(batch)], added.shape[len(batch) :]
    flat = 1 if all(n == 1 for n in leading) else math.prod(batch)
    if flat != 1:
        added = jnp.broadcast_to(added, (*batch, heads, *rest))
    return jnp.broadcast_to(added.reshape(flat, heads, *rest), (flat, heads, *shape[1:]))


def over_cache(
    call: OpCall, name: str, arrays: Sequence[Any], op: Callable[..., Any]
) -> Callable[..., Any]:
    """Return the attention op for caches of quantized keys and values, which kernels read there.

    A kernel reads a cache that is carried as int8 as quantized values and scales. It reads a cache
    that the program transposes for its attention in the order that it has in memory, and one that
    the program takes out of the caches of all layers, by an index, in their stack. Otherwise XLA
    would copy the cache for the kernel.

    Arrays are queries, keys and values, ``[..., length, heads, size]``. Only ``DECODE`` reads
    caches where they lie; ``op`` computes attention of floats, ``[batch, length, heads, size]``, or
    of int8 with scales.
    """
    if name != DECODE:
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
