"""The targets as functions of arrays that can be batched; the FFI's operands go no further."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import _op
from . import dense, operands, partition
from .config import Config, Sizes, sizes_of
from .operands import Sequences
from .types import AttnBiasType, AttnSoftmaxType

Arrays = tuple[jax.Array, ...]
Forward = tuple[jax.Array, jax.Array, jax.Array]
Backward = tuple[Arrays, jax.Array, jax.Array]


def forward(
    config: Config,
    qkv: Arrays,
    bias: jax.Array,
    offset: jax.Array,
    seed: jax.Array,
    sequences: Sequences,
) -> Forward:
    """Result, log-sum-exp and random state."""
    return _forward_once(config, qkv, bias, offset, seed, sequences)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward_once(config: Config, *given: Any) -> Forward:
    return _op.batched(functools.partial(_forward, config), functools.partial(_fold, config))(
        *given
    )


def _forward_saved(config: Config, *given: Any) -> tuple[Forward, Any]:
    return _forward_once(config, *given), given


def _forward_again(config: Config, given: Any, cotangents: Any) -> Any:
    # Reached by gradients of gradients alone: `ops` has a kernel for the first.
    qkv, bias, offset, seed, sequences = given
    sizes, words = sizes_of("fused_attn_fwd", qkv, config.layout), random_words(random_state(seed))

    def plain(qkv: Arrays, bias: jax.Array, offset: jax.Array) -> tuple[jax.Array, jax.Array]:
        return dense.forward(config, sizes, qkv, bias, offset, words, sequences)

    return (*jax.vjp(plain, qkv, bias, offset)[1](tuple(cotangents[:2])), None, None)


_forward_once.defvjp(_forward_saved, _forward_again)


def backward(
    config: Config,
    qkv: Arrays,
    bias: jax.Array,
    offset: jax.Array,
    aux: jax.Array,
    rng_state: jax.Array,
    out: jax.Array,
    out_grad: jax.Array,
    sequences: Sequences,
) -> Backward:
    """Gradients of the arrays, of the bias and of the offset."""
    given = (qkv, bias, offset, aux, rng_state, out, out_grad, sequences)
    return _differentiable(config, *given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(config: Config, *given: Any) -> Backward:
    run = functools.partial(_backward, config)
    return _op.batched(run, functools.partial(_fold_backward, config))(*given)


def _second_forward(config: Config, *given: Any) -> tuple[Backward, Any]:
    return _differentiable(config, *given), given


def _second_backward(config: Config, given: Any, cotangents: Backward) -> Any:
    # Gradients of gradients are those of the plain computation.
    qkv, bias, offset, aux, rng_state, out, out_grad, sequences = given
    sizes = sizes_of("fused_attn_bwd", qkv, config.layout)

    def plain(*arrays: Any) -> Backward:
        qkv, bias, offset, aux, out, out_grad = arrays
        rest = (out, out_grad, sequences)
        return dense.backward(config, sizes, qkv, bias, offset, aux, random_words(rng_state), *rest)

    found = jax.vjp(plain, qkv, bias, offset, aux, out, out_grad)[1](cotangents)
    return (*found[:4], None, *found[4:], None)


_differentiable.defvjp(_second_forward, _second_backward)


def random_words(random: jax.Array) -> jax.Array:
    """Seed and offset of a random state, or of a seed."""
    flat = random.reshape(-1)[:4]
    return jnp.pad(flat[:2], (0, 2)) if flat.size < 4 else flat


def _forward(
    config: Config,
    qkv: Arrays,
    bias: jax.Array,
    offset: jax.Array,
    seed: jax.Array,
    sequences: Sequences,
) -> Forward:
    sizes = sizes_of("fused_attn_fwd", qkv, config.layout)
    count = len(qkv)

    def in_jax(*given: Any) -> Forward:
        words = jnp.pad(given[5].reshape(-1)[:2], (0, 2))
        bias, offset = given[3:5]
        out, aux = dense.forward(config, sizes, given[:count], bias, offset, words, given[6:])
        return out, aux, random_state(given[5])

    def results(*given: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
        own, seed = sizes_of("fused_attn_fwd", given[:count], config.layout), given[5]
        return (
            jax.ShapeDtypeStruct(own.out, given[0].dtype),
            jax.ShapeDtypeStruct(own.aux(config.layout), jnp.float32),
            jax.ShapeDtypeStruct((seed.shape[0], 4), jnp.uint32),
        )

    seeds = partition.names_of_seed("seed", seed)
    axes = [
        *partition.names_of(sizes, qkv),
        partition.names_of_bias(sizes, bias),
        partition.names_of_offset(offset),
        seeds,
        *partition.SEQUENCES,
    ]
    found = [["b", "s0", "h", "dv"], ["b", "h", "s0", "one"], [seeds[0], "words"]]
    return _call(
        "fused_attn_forward",
        config,
        in_jax,
        (*operands.arrays(qkv), bias, offset, seed, *sequences),
        results,
        axes,
        found,
        (),
    )


def _call(
    op: str,
    config: Config,
    in_jax: Callable[..., Any],
    given: Sequence[jax.Array],
    results: Callable[..., Any],
    axes: partition.Names,
    found: partition.Names,
    sums: Sequence[int],
) -> Any:
    """Calls a target. Operands end with lengths, of which it is given the cumulative sums."""
    count = 3 - sum(x.size == 0 and x.ndim == 1 for x in given[:3])

    def attributes(*given: jax.Array) -> dict[str, Any]:
        return operands.attributes(
            config, sizes_of(op, given[:count], config.layout), given[3].shape
        )

    def split(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def of_lengths(results: Any, attributes: Any, *given: jax.Array) -> Any:
            return kernel(results, attributes, *given[:-4], *_cumulative(given[-4:]))

        sizes = sizes_of(op, given[:count], config.layout)
        return partition.partitioned(config, sizes, axes, found, sums, results, attributes)(
            of_lengths
        )

    asked = (*given[:-4], *jax.eval_shape(_cumulative, given[-4:]))
    return _op.call(
        op,
        in_jax,
        given,
        results(*given),
        asked=asked,
        partition=split,
        **attributes(*given),
    )


def _cumulative(sequences: Arrays) -> Sequences:
    cu = [operands.cumulative(lengths) for lengths in sequences[:2]]
    return cu[0], cu[1], sequences[2], sequences[3]


def random_state(seed: jax.Array) -> jax.Array:
    """Seed, and an offset of 0, in rows of four words; as many rows as the seed has."""
    words = seed.reshape(-1)[:2]
    return jnp.pad(words, (0, 4 * seed.shape[0] - 2)).reshape(seed.shape[0], 4)


def _backward(
    config: Config,
    qkv: Arrays,
    bias: jax.Array,
    offset: jax.Array,
    aux: jax.Array,
    rng_state: jax.Array,
    out: jax.Array,
    out_grad: jax.Array,
    sequences: Sequences,
) -> Backward:
    sizes = sizes_of("fused_attn_bwd", qkv, config.layout)
    count = len(qkv)

    def in_jax(*given: Any) -> Arrays:
        bias, offset, aux, random, out, out_grad = given[3:9]
        rest = (aux, random_words(random), out, out_grad, given[9:])
        grads, *others = dense.backward(config, sizes, given[:count], bias, offset, *rest)
        return (*operands.arrays(grads), *others)

    def results(*given: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
        return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[:5])

    result, lse = ["b", "s0", "h", "dv"], ["b", "h", "s0", "one"]
    grads = [
        *partition.names_of(sizes, qkv),
        partition.names_of_bias(sizes, bias),
        partition.names_of_offset(offset),
    ]
    random = partition.names_of_seed("random", rng_state)
    found = _call(
        "fused_attn_backward",
        config,
        in_jax,
        (*operands.arrays(qkv), bias, offset, aux, rng_state, out, out_grad, *sequences),
        results,
        [*grads, lse, random, result, result, *partition.SEQUENCES],
        grads,
        [i for i, x in ((3, bias), (4, offset)) if x.ndim == 4],
    )
    return tuple(found[:count]), found[3], found[4]


def _fold(config: Config, axis_size: int, in_batched: Sequence[Any], *given: Any) -> Any:
    """The mapped axis becomes one with the batch, where the rest allows it."""
    qkv, bias, offset, seed, sequences = given
    flags = in_batched
    random = flags[3] or config.dropout > 0  # random numbers depend on the batch
    folded = None if random or flags[2] else _folded_bias(config, axis_size, given, flags)
    if folded is None:
        return NotImplemented
    # A bias that all share can stay as it is.
    shared = not flags[1] and (bias.ndim != 4 or bias.shape[0] == 1)
    out, aux, state = forward(
        config,
        _merged(axis_size, qkv, flags[0]),
        bias if shared else folded,
        offset,
        seed,
        _merged_sequences(config, axis_size, qkv, flags[0], sequences, flags[4]),
    )
    return (_split(axis_size, out), _split(axis_size, aux), state), (True, True, False)


def _fold_backward(config: Config, axis_size: int, in_batched: Sequence[Any], *given: Any) -> Any:
    qkv, _, offset, aux, rng_state, out, out_grad, sequences = given
    flags = in_batched
    # The offset's gradient is a sum over the batch.
    summed = config.softmax_type is not AttnSoftmaxType.VANILLA_SOFTMAX
    random = flags[4] or config.dropout > 0
    folded = None if random or summed else _folded_bias(config, axis_size, given, flags)
    if folded is None:
        return NotImplemented
    merged = _merged(axis_size, (aux, out, out_grad), (flags[3], flags[5], flags[6]))
    grads, bias_grad, offset_grad = backward(
        config,
        _merged(axis_size, qkv, flags[0]),
        folded,
        offset,
        merged[0],
        rng_state,
        merged[1],
        merged[2],
        _merged_sequences(config, axis_size, qkv, flags[0], sequences, flags[7]),
    )
    grads = tuple(_split(axis_size, grad) for grad in grads)
    has_bias = config.bias_type is not AttnBiasType.NO_BIAS
    if has_bias:
        bias_grad = _split(axis_size, bias_grad)
    return (grads, bias_grad, offset_grad), (tuple(True for _ in grads), has_bias, False)


def _split(axis_size: int, x: jax.Array) -> jax.Array:
    return x.reshape(axis_size, x.shape[0] // max(axis_size, 1), *x.shape[1:])


def _merged(axis_size: int, arrays: Any, flags: Any) -> Any:
    """The mapped axis of arrays merged with the next; repeated where they have none."""

    def one(array: jax.Array, flag: bool) -> jax.Array:
        if not flag:
            array = jnp.broadcast_to(array[None], (axis_size, *array.shape))
        return array.reshape(array.shape[0] * array.shape[1], *array.shape[2:])

    return tuple(one(array, flag) for array, flag in zip(arrays, flags, strict=True))


def _folded_bias(
    config: Config, axis_size: int, given: Sequence[Any], flags: Sequence[Any]
) -> jax.Array | None:
    """A bias for each batch entry of each index; None where a batch shares one."""
    qkv, bias = given[:2]
    if config.bias_type is AttnBiasType.NO_BIAS:
        return bias
    batch = qkv[0].shape[1 if flags[0][0] else 0]
    return _merged(axis_size, (bias,), (flags[1],))[0] if bias.shape[-4] == batch else None


def _merged_sequences(
    config: Config, axis_size: int, qkv: Any, qkv_flags: Any, sequences: Any, flags: Any
) -> Any:
    q_lengths, kv_lengths, q_starts, kv_starts = _with_axis(axis_size, sequences, flags)
    if config.layout.is_thd():
        shapes = [
            jax.ShapeDtypeStruct(x.shape[1:] if flag else x.shape, x.dtype)
            for x, flag in zip(qkv, qkv_flags, strict=True)
        ]
        sizes: Sizes = sizes_of("fused_attn_fwd", shapes, config.layout)  # pyrefly: ignore
        index = jnp.arange(axis_size, dtype=jnp.int32)[:, None] * sizes.batch
        q_starts = q_starts + index * sizes.q_length
        kv_starts = kv_starts + index * sizes.kv_length
    return tuple(x.reshape(-1) for x in (q_lengths, kv_lengths, q_starts, kv_starts))


def _with_axis(axis_size: int, arrays: Any, flags: Any) -> tuple[jax.Array, ...]:
    return tuple(
        array if flag else jnp.broadcast_to(array[None], (axis_size, *array.shape))
        for array, flag in zip(arrays, flags, strict=True)
    )
