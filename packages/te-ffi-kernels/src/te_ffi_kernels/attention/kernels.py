"""The two kernels of attention: forward, and its gradient.

Both take three arrays of queries, keys and values (empty ones if the layout has fewer), the bias
and the softmax offset first, and four arrays that say where sequences are last. Between them are
the operands that only one kernel has.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..batching import widened
from ..op import Op, gradient_of
from ..partition import Names, partition_rows
from . import operands, reference, ring
from .blocks import are_few_cuts
from .config import Config, Sizes, sizes_of, unshared
from .types import AttnSoftmaxType

Arrays = tuple[jax.Array, ...]


def random_words(random: jax.Array) -> jax.Array:
    """Return seed and offset of a random state, or of a seed."""
    flat = random.reshape(-1)[:4]
    return jnp.pad(flat[:2], (0, 2)) if flat.size < 4 else flat


def _sizes(config: Config, given: Arrays) -> Sizes:
    return sizes_of("fused_attn", given[: config.layout.arrays], config.layout)


def forward_in_jax(config: Config, *given: jax.Array) -> Arrays:
    """Return the result, the log-sum-exp and the random state."""
    bias, offset, seed, *_ = given[3:]
    state = operands.random_state(seed)
    qkv = given[: config.layout.arrays]
    rest = (bias, offset, random_words(state), given[-4:])
    return *reference.forward(config, _sizes(config, given), qkv, *rest), state


def _backward_in_jax(config: Config, *given: jax.Array) -> Arrays:
    bias, offset, aux, random, out, out_grad, *_ = given[3:]
    qkv = given[: config.layout.arrays]
    saved = (aux, random_words(random), out, out_grad, given[-4:])
    grads, *rest = reference.backward(config, _sizes(config, given), qkv, bias, offset, *saved)
    return *operands.arrays(grads), *rest


def _forward_results(config: Config, *given: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    sizes = _sizes(config, given)
    return (
        jax.ShapeDtypeStruct(sizes.out, given[0].dtype),
        jax.ShapeDtypeStruct(sizes.aux(config.layout), jnp.float32),
        jax.ShapeDtypeStruct((given[5].shape[0], 4), jnp.uint32),
    )


def _backward_results(config: Config, *given: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
    return tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in given[:5])


def _attributes(config: Config, *given: jax.Array) -> dict[str, Any]:
    return operands.attributes(config, _sizes(config, given), given[3].shape)


def _lowered(config: Config, *given: jax.Array) -> Arrays:
    """Return a kernel's operands: lengths become cumulative sums."""
    *first, q_lengths, kv_lengths, q_starts, kv_starts = given
    lengths = map(operands.cumulative, (q_lengths, kv_lengths))
    return *first, *lengths, q_starts, kv_starts


def _partition_forward(config: Config, block: Any, *given: jax.Array) -> Any:
    seed = [f"seed{i}" for i in range(given[5].ndim)]
    found = [["b", "s0", "h", "dv"], ["b", "h", "s0", "one"], [seed[0], "words"]]
    return _partition(config, block, ring.forward, given, [seed], found)


def _partition_backward(config: Config, block: Any, *given: jax.Array) -> Any:
    result, aux = ["b", "s0", "h", "dv"], ["b", "h", "s0", "one"]
    random = [f"random{i}" for i in range(given[6].ndim)]
    sums = [i for i in (3, 4) if given[i].ndim == 4]
    middle = [aux, random, result, result]
    return _partition(config, block, ring.backward, given, middle, None, sums)


def _partition(
    config: Config,
    block: Any,
    around: Any,
    given: Arrays,
    middle: Names,
    found: Names | None,
    sums: Any = (),
) -> Any:
    """Share out batches, heads and sequences, if nothing needs whole batches.

    Args:
        config: config of the call.
        block: calls the kernel.
        around: calls it for each block of keys, if sequences are shared out.
        given: the operands.
        middle: axis names of the operands between the offset and the sequences.
        found: axis names of the results; None if they are those of the first operands.
        sums: indices of the results that are sums over batches, heads or queries.
    """
    run = functools.partial(block, config)
    if config.layout.is_thd() or config.dropout > 0:
        return run
    sizes = _sizes(config, given)
    bias, offset = given[3:5]
    first = []
    for i, array in enumerate(given[:3]):
        inner = ["three"] if array.ndim == 5 else []
        axes = ["b", f"s{i}", *inner, "g" if i else "h", f"d{i}"]
        first.append(axes if i < config.layout.arrays else [f"none{i}"])
    first.append([f"bias{i}" for i in range(bias.ndim)])
    if bias.ndim == 4:
        first[-1][2] = "s0"
    for i, (name, size) in enumerate((("b", sizes.batch), ("h", sizes.heads))):
        if bias.ndim == 4 and bias.shape[i] == size:
            first[-1][i] = name
    first.append(["offset0", "h", "offset2", "offset3"] if offset.ndim == 4 else ["offset0"])
    names = [*first, *middle, ["b"], ["b"], ["starts0"], ["starts1"]]
    # Heads of queries that share keys are side by side: they are shared out as those of keys.
    grouped = sizes.heads != sizes.kv_heads
    replaced = {} if grouped else {"g": "h"}
    cut, alike = {"b", "h", "g"}, {"g": "h"}
    if unshared(config) is None and are_few_cuts(config, sizes):
        cut |= {"s0", "s1"}
        if sizes.q_length == sizes.kv_length:
            replaced |= {"s1": "s0", "s2": "s0"}
        else:
            replaced |= {"s2": "s1"}
            alike["s1"] = "s0"
    names, found = (
        [[replaced.get(name, name) for name in axes] for axes in side]
        for side in (names, first if found is None else found)
    )
    whole = {
        part for axes in (*names, *found) for name in axes for part in name.strip("()").split()
    }

    def on_device(specs: Any) -> Any:
        axes = specs[0][1]
        if axes is None:
            return run
        axes = (axes,) if isinstance(axes, str) else tuple(axes)
        return functools.partial(around, block, axes, config)

    options: dict[str, Any] = {"alike": alike, "on_device": on_device}
    return partition_rows(run, names, found, whole - cut, sums, **options)


def _batch_forward(run: Any, config: Config, size: int, in_batched: Any, *given: jax.Array) -> Any:
    """Merge the mapped axis into the batch, if other operands allow it."""
    random = in_batched[5] or config.dropout > 0  # random numbers depend on the batch
    folded = None if random or in_batched[4] else _folded_bias(config, size, given, in_batched)
    if folded is None:
        return NotImplemented
    bias, offset, seed = given[3:6]
    # A bias that all share can stay as it is.
    shared = not in_batched[3] and (bias.ndim != 4 or bias.shape[0] == 1)
    out, aux, state = run(
        config,
        *_merged_arrays(config, size, in_batched, given),
        bias if shared else folded,
        offset,
        seed,
        *_merged_sequences(config, size, in_batched, given),
    )
    return (_split(size, out), _split(size, aux), state), (True, True, False)


def _batch_backward(run: Any, config: Config, size: int, in_batched: Any, *given: Any) -> Any:
    # The offset's gradient is a sum over the batch.
    summed = config.softmax_type is not AttnSoftmaxType.VANILLA_SOFTMAX
    random = in_batched[6] or config.dropout > 0
    folded = None if random or summed else _folded_bias(config, size, given, in_batched)
    if folded is None:
        return NotImplemented
    aux, out, out_grad = (_merged(size, in_batched[i : i + 1], given[i])[0] for i in (5, 7, 8))
    grads = run(
        config,
        *_merged_arrays(config, size, in_batched, given),
        folded,
        given[4],
        aux,
        given[6],
        out,
        out_grad,
        *_merged_sequences(config, size, in_batched, given),
    )
    count = config.layout.arrays
    mapped = [i < count or (i == 3 and config.has_bias) for i in range(5)]
    return tuple(
        _split(size, x) if split else x for x, split in zip(grads, mapped, strict=True)
    ), tuple(mapped)


def _split(size: int, x: jax.Array) -> jax.Array:
    return x.reshape(size, x.shape[0] // max(size, 1), *x.shape[1:])


def _merged(size: int, in_batched: Any, *arrays: jax.Array) -> Arrays:
    """Merge each array's mapped axis with the next; repeat unmapped arrays."""
    wide = widened(size, in_batched, *arrays)
    return tuple(x.reshape(x.shape[0] * x.shape[1], *x.shape[2:]) for x in wide)


def _merged_arrays(config: Config, size: int, in_batched: Any, given: Arrays) -> Arrays:
    count = config.layout.arrays
    return operands.arrays(_merged(size, in_batched[:count], *given[:count]))


def _folded_bias(config: Config, size: int, given: Arrays, in_batched: Any) -> jax.Array | None:
    """Return the bias for the merged batch, or None.

    None if all entries of a batch share one, which the merged batch can't.
    """
    bias = given[3]
    if not config.has_bias:
        return bias
    batch = given[0].shape[1 if in_batched[0] else 0]
    return _merged(size, in_batched[3:4], bias)[0] if bias.shape[-4] == batch else None


def _merged_sequences(config: Config, size: int, in_batched: Any, given: Arrays) -> Arrays:
    found = widened(size, in_batched[-4:], *given[-4:])
    if config.layout.is_thd():
        shapes = tuple(
            jax.ShapeDtypeStruct(x.shape[1:] if flag else x.shape, x.dtype)
            for x, flag in zip(given[:3], in_batched, strict=False)
        )
        sizes = _sizes(config, shapes)  # pyrefly: ignore
        index = jnp.arange(size, dtype=jnp.int32)[:, None] * sizes.batch
        found[2] = found[2] + index * sizes.q_length
        found[3] = found[3] + index * sizes.kv_length
    return tuple(x.reshape(-1) for x in found)


def _gradient(config: Config, given: Arrays, cotangents: Any) -> Any:
    # Reached by gradients of gradients alone: fused_attn has a kernel for the first.
    def plain(*floats: jax.Array) -> Arrays:
        return forward_in_jax(config, *floats, *given[5:])[:2]

    return *jax.vjp(plain, *given[:5])[1](tuple(cotangents[:2])), *(None,) * 5


FORWARD = Op(
    "fused_attn_forward",
    forward_in_jax,
    results=_forward_results,
    attributes=_attributes,
    lowered=_lowered,
    partition=_partition_forward,
    batch=_batch_forward,
    gradient=_gradient,
)
BACKWARD = Op(
    "fused_attn_backward",
    _backward_in_jax,
    results=_backward_results,
    attributes=_attributes,
    lowered=_lowered,
    partition=_partition_backward,
    batch=_batch_backward,
    gradient=gradient_of(_backward_in_jax),
)
