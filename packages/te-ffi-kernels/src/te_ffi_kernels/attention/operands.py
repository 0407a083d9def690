"""The operands of the targets, from the arguments of the ops."""

from __future__ import annotations

import os
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import checks
from . import config as configs
from .config import Config, Sizes
from .sequence import SequenceDescriptor
from .types import AttnSoftmaxType

Sequences = tuple[jax.Array, ...]
"""Four arrays: lengths of the sequences of queries and of keys, int32[n]; and where these begin,
counted over all tokens: int32[n] for THD layouts, else int32[0]."""


def softmax_offset(op: str, config: Config, heads: int, given: jax.Array | None) -> jax.Array:
    """Return the offset, float32[1, heads, 1, 1]; of size 0 without one."""
    if config.softmax_type is AttnSoftmaxType.VANILLA_SOFTMAX:
        if given is not None and given.size:
            raise ValueError(
                f"{op}: softmax_offset must be None with VANILLA_SOFTMAX, got {given.shape}"
            )
        return jnp.zeros((0,), jnp.float32)
    if given is None:
        if config.softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX:
            raise ValueError(
                f"{op}: softmax_offset must be an array with LEARNABLE_SOFTMAX, got None"
            )
        return jnp.zeros((1, heads, 1, 1), jnp.float32)
    return configs.check_array(op, "softmax_offset", given, (1, heads, 1, 1), jnp.float32)


def seed(op: str, config: Config, given: jax.Array | None) -> jax.Array:
    """Return the seed, uint32 of at least two numbers."""
    if given is None:
        if config.dropout > 0:
            raise ValueError(f"{op}: seed must be an array with dropout {config.dropout}, got None")
        return jnp.zeros((2,), jnp.uint32)
    if jnp.issubdtype(given.dtype, jax.dtypes.prng_key):
        given = jax.random.key_data(given)
    if given.dtype != jnp.uint32:
        raise TypeError(f"{op}: seed must be uint32, or a key, got {given.dtype.name}")
    if given.ndim == 0 or given.size < 2:
        raise ValueError(f"{op}: seed must have shape (2,), got {given.shape}")
    return given


def random_state(seed: jax.Array) -> jax.Array:
    """Return seed and offset 0 as uint32[rows of seed, 4]."""
    words = seed.reshape(-1)[:2]
    return jnp.pad(words, (0, 4 * seed.shape[0] - 2)).reshape(seed.shape[0], 4)


def sequences(
    op: str, config: Config, sizes: Sizes, descriptor: SequenceDescriptor | None
) -> Sequences:
    """Return where whole sequences are; `sizes` may have a part of them."""
    if config.layout.is_thd():
        return _segments(op, config, sizes, descriptor)
    none = jnp.zeros((0,), jnp.int32)
    axes = config.context_axes
    parts = lax.axis_size(axes) if axes else 1
    if not config.mask_type.is_padding():
        lengths = parts * sizes.q_length, parts * sizes.kv_length
        full = [jnp.full((sizes.batch,), n, jnp.int32) for n in lengths]
        return full[0], full[1], none, none
    if descriptor is None:
        raise ValueError(
            f"{op}: sequence_descriptor must have lengths with attn_mask_type "
            f"{config.mask_type.name}, got None"
        )
    found = []
    for name, at, length in (("q", 0, sizes.q_length), ("kv", 1, sizes.kv_length)):
        ids = descriptor.segment_ids[at]
        if ids.size or not descriptor.seqlens[at].size:
            wanted = (sizes.batch, length)
            if ids.shape != wanted and sizes.batch:
                raise ValueError(
                    f"{op}: sequence_descriptor must have {name} seqlens of shape {wanted[:1]} or "
                    f"segment_ids of {wanted}, got {descriptor.seqlens[at].shape} and {ids.shape}"
                )
            here = jnp.sum(ids.reshape(wanted) != 0, axis=1, dtype=jnp.int32)
            found.append(lax.psum(here, axes) if axes else here)
            continue
        lengths = descriptor.seqlens[at]
        _integers(op, f"sequence_descriptor's {name} seqlens", lengths, (sizes.batch,))
        found.append(jnp.clip(lengths.astype(jnp.int32), 0, parts * length))
    return found[0], found[1], none, none


def _segments(
    op: str, config: Config, sizes: Sizes, descriptor: SequenceDescriptor | None
) -> Sequences:
    if descriptor is None:
        raise ValueError(
            f"{op}: sequence_descriptor must have segments with qkv_layout {config.layout.name}, "
            "got None"
        )
    lengths, starts = [], []
    most = config.max_segments_per_seq
    for name, at, length in (("q", 0, sizes.q_length), ("kv", 1, sizes.kv_length)):
        ids = descriptor.segment_ids[at]
        if ids.size:
            what = f"sequence_descriptor's {name} segment_ids"
            _integers(op, what, ids, (sizes.batch, length))
            numbers = jnp.arange(1, most + 1, dtype=ids.dtype)
            belongs = ids[:, None, :] == numbers[None, :, None]
            count = jnp.sum(belongs, axis=2, dtype=jnp.int32)
            begin = jnp.argmax(belongs, axis=2).astype(jnp.int32)
        else:
            count, begin = descriptor.seqlens[at], descriptor.seq_offsets[at]
            for what, array in (("seqlens", count), ("seq_offsets", begin)):
                if array.ndim != 2 or array.shape[0] != sizes.batch:
                    raise ValueError(
                        f"{op}: {name} {what} of sequence_descriptor must have shape "
                        f"({sizes.batch}, segments), got {array.shape}"
                    )
                _integers(op, f"sequence_descriptor's {name} {what}", array, array.shape)
            columns = min(most, count.shape[1], begin.shape[1])
            padding = ((0, 0), (0, most - columns))
            count = jnp.pad(count[:, :columns].astype(jnp.int32), padding)
            begin = jnp.pad(begin[:, :columns].astype(jnp.int32), padding)
            count = jnp.where(begin < 0, 0, count)
            begin = jnp.clip(begin, 0, length)
            count = jnp.clip(count, 0, length - begin)
        rows = jnp.arange(sizes.batch, dtype=jnp.int32)[:, None] * length
        lengths.append(count.reshape(-1))
        starts.append((begin + rows).reshape(-1))
    return lengths[0], lengths[1], starts[0], starts[1]


def _integers(op: str, name: str, array: jax.Array, shape: tuple[int, ...]) -> None:
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{op}: {name} must be int32, got {array.dtype.name}")
    checks.shape(op, name, array, shape)


def cumulative(lengths: jax.Array) -> jax.Array:
    """Return the cumulative sums of lengths [n] from 0, int32[n + 1]."""
    return jnp.concatenate([jnp.zeros((1,), jnp.int32), jnp.cumsum(lengths, dtype=jnp.int32)])


def attributes(config: Config, sizes: Sizes, bias_shape: tuple[int, ...]) -> dict[str, Any]:
    """Return the attributes of the FFI call, as Transformer Engine has them."""
    bias_batch, bias_heads = bias_shape[:2] if len(bias_shape) == 4 else (0, 0)
    return {
        "input_batch": sizes.batch,
        "bias_batch": bias_batch,
        "q_max_seqlen": sizes.q_length,
        "kv_max_seqlen": sizes.kv_length,
        "attn_heads": sizes.heads,
        "num_gqa_groups": sizes.kv_heads,
        "bias_heads": bias_heads,
        "qk_head_dim": sizes.qk_size,
        "v_head_dim": sizes.v_size,
        "max_segments_per_seq": config.max_segments_per_seq,
        "scaling_factor": config.scaling_factor,
        "dropout_probability": config.dropout_probability,
        "bias_type": int(config.bias_type),
        "mask_type": int(config.mask_type),
        "qkv_layout": int(config.layout),
        "is_training": config.is_training,
        "deterministic": _deterministic(),
        "window_size_left": config.window_size[0],
        "window_size_right": config.window_size[1],
        "bottom_right_diagonal": config.mask_type.is_bottom_right(),
        "softmax_type": int(config.softmax_type),
    }


def _deterministic() -> bool:
    """Return whether kernels must be deterministic, where that is slower.

    CPU kernels always are. Other kernels follow the flags that XLA's own attention follows.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    names = ("--xla_gpu_deterministic_ops", "--xla_gpu_exclude_nondeterministic_ops")
    return any(flag in (name, f"{name}=true", f"{name}=1") for name in names for flag in flags)


def arrays(qkv: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """Return three arrays; those that the layout lacks have size 0."""
    none = jnp.zeros((0,), qkv[0].dtype)
    return (*qkv, *(none,) * (3 - len(qkv)))
