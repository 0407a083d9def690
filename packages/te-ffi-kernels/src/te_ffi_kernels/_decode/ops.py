"""Attention of a few queries over a cache of keys and values."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _op
from .._rows import partition_rows
from . import reference
from .config import Config, prepared


def decode_attention(
    q: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    length: jax.Array | int,
    *,
    key_scale: jax.Array | None = None,
    value_scale: jax.Array | None = None,
    mask: jax.Array | None = None,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    causal: bool = True,
    heads_first: bool = True,
) -> jax.Array:
    """Attend with a few queries over a cache of keys and values.

    Softmax in float32. Nothing is transposed or widened in memory, and what lies beyond the length
    or before the window is not read, so that a step takes as long as reading what it sees. Queries
    and heads that share keys read them once (Ainslie et al. 2023, arXiv:2305.13245); stretches of
    the cache are shared out over threads, as in Flash-Decoding.

    Args:
        q: float32, bfloat16 or float16 [batch, queries, heads, size].
        keys: the cache [batch, kv_heads, positions, size], float32, bfloat16, float16 or int8.
            ``heads`` is a multiple of ``kv_heads``.
        values: of the shape and dtype of keys.
        length: int32[] or int32[batch], the positions that are filled, those of the queries among
            them.
        key_scale: float32[batch, kv_heads, positions], of an int8 cache.
        value_scale: likewise.
        mask: bool[batch or 1, queries or 1, positions], true where a position is seen, if its
            query sees it by the length.
        scale: of logits, by default 1 / sqrt(size).
        window: the last positions that a query sees, its own among them; None or 0 for all.
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
    given = q, keys, values, length, key_scale, value_scale, mask
    options: dict[str, Any] = {"scale": scale, "window": window, "softcap": softcap}
    options |= {"causal": causal, "heads_first": heads_first}
    config, operands = prepared(*given, **options)
    return _run(config, *_op.alike(*operands)).reshape(q.shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(config: Config, *operands: jax.Array) -> jax.Array:
    return _batched(config)(*operands)


def _forward(config: Config, *operands: jax.Array) -> tuple[jax.Array, Any]:
    return _batched(config)(*operands), operands


def _backward(config: Config, operands: tuple[jax.Array, ...], ct: jax.Array) -> tuple[Any, ...]:
    floats = [i for i, x in enumerate(operands) if jnp.issubdtype(x.dtype, jnp.floating)]

    def of_floats(*given: jax.Array) -> jax.Array:
        filled = dict(zip(floats, given, strict=True))
        return reference.attend(config, *(filled.get(i, x) for i, x in enumerate(operands)))

    found = iter(jax.vjp(of_floats, *(operands[i] for i in floats))[1](ct))
    return tuple(
        next(found) if i in floats else np.zeros(x.shape, jax.dtypes.float0)
        for i, x in enumerate(operands)
    )


_attention.defvjp(_forward, _backward)

# Jitted so that a model with many equal layers traces it once.
_run = jax.jit(_attention, static_argnums=0)


def _batched(config: Config) -> Any:
    def rule(axis_size: int, in_batched: Sequence[bool], *operands: jax.Array) -> Any:
        """Mapped sequences are sequences of one batch."""
        mapped = in_batched[:3], in_batched[4 : 4 + 2 * config.scaled]
        if not all((*mapped[0], *mapped[1])):
            return NotImplemented
        batch = operands[0].shape[1]

        def merged(x: jax.Array, mapped: bool) -> jax.Array:
            if not mapped:
                x = jnp.broadcast_to(x, (axis_size, *x.shape))
            if x.shape[1] != batch:  # a mask for all of a batch
                x = jnp.broadcast_to(x, (axis_size, batch, *x.shape[2:]))
            return x.reshape(axis_size * batch, *x.shape[2:])

        out = wrapped(*map(merged, operands, in_batched))
        return out.reshape(axis_size, batch, *out.shape[1:]), True

    wrapped = _op.batched(functools.partial(_kernel, config), rule)
    return wrapped


def _kernel(config: Config, *operands: jax.Array) -> jax.Array:
    cache = "bks" if config.heads_first else "bsk"
    names = [[*"btkgd"], [*cache, "d"], [*cache, "d"], ["b"]]
    if config.scaled:
        names += [[*cache], [*cache]]
    if config.masked:
        mask = operands[-1]
        names += [["b" if mask.shape[0] > 1 else "m", "t" if mask.shape[1] > 1 else "n", "s"]]
    whole = {"t", "g", "d", "s", "m", "n"} & {name for one in names for name in one}

    def result(q: jax.Array, *_: jax.Array) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(q.shape, q.dtype)

    attributes: dict[str, Any] = {
        name: np.float64(value) if isinstance(value, float) else value
        for name, value in dataclasses.asdict(config).items()
    }
    return _op.call(
        "decode_attention",
        functools.partial(reference.attend, config),
        operands,
        result(*operands),
        partition=partition_rows(names, [[*"btkgd"]], whole, result, attributes),
        **attributes,
    )
