"""Fused attention in plain JAX, with all scores in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from . import calls, dense
from .config import sizes_of
from .ops import Qkv, prepared
from .sequence import SequenceDescriptor
from .types import AttnSoftmaxType


def fused_attn_fwd(
    qkv: Sequence[jax.Array],
    bias: jax.Array | None,
    softmax_offset: jax.Array | None,
    sequence_descriptor: SequenceDescriptor | None,
    seed: jax.Array | None,
    attn_bias_type: Any,
    attn_mask_type: Any,
    softmax_type: Any,
    qkv_layout: Any,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int = 1,
    window_size: Sequence[int] | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As ``te_ffi_kernels.fused_attn_fwd``."""
    op = "fused_attn_fwd"
    config, (arrays, some_bias, offset, words, sequences) = prepared(
        op,
        qkv,
        bias,
        softmax_offset,
        sequence_descriptor,
        seed,
        attn_bias_type,
        attn_mask_type,
        softmax_type,
        qkv_layout,
        scaling_factor,
        dropout_probability,
        is_training,
        max_segments_per_seq,
        window_size,
    )
    sizes, state = sizes_of(op, arrays, config.layout), calls.random_state(words)
    random = calls.random_words(state)
    out, aux = dense.forward(config, sizes, arrays, some_bias, offset, random, sequences)
    return out, aux, state


def fused_attn_bwd(
    qkv: Sequence[jax.Array],
    bias: jax.Array | None,
    softmax_offset: jax.Array | None,
    softmax_aux: jax.Array,
    rng_state: jax.Array,
    output: jax.Array,
    doutput: jax.Array,
    sequence_descriptor: SequenceDescriptor | None,
    attn_bias_type: Any,
    attn_mask_type: Any,
    qkv_layout: Any,
    softmax_type: Any,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int = 1,
    window_size: Sequence[int] | None = None,
) -> tuple[Qkv, jax.Array | None, jax.Array | None]:
    """As ``te_ffi_kernels.fused_attn_bwd``."""
    op = "fused_attn_bwd"
    config, (arrays, some_bias, offset, words, sequences) = prepared(
        op,
        qkv,
        bias,
        softmax_offset,
        sequence_descriptor,
        rng_state,
        attn_bias_type,
        attn_mask_type,
        softmax_type,
        qkv_layout,
        scaling_factor,
        dropout_probability,
        is_training,
        max_segments_per_seq,
        window_size,
    )
    sizes, random = sizes_of(op, arrays, config.layout), calls.random_words(words)
    saved = (softmax_aux, random, output, doutput, sequences)
    grads, bias_grad, offset_grad = dense.backward(config, sizes, arrays, some_bias, offset, *saved)
    no_offset = config.softmax_type is AttnSoftmaxType.VANILLA_SOFTMAX
    return grads, None if bias is None else bias_grad, None if no_offset else offset_grad


def fused_attn(
    qkv: Sequence[jax.Array],
    bias: jax.Array | None,
    sequence_descriptor: SequenceDescriptor | None,
    seed: jax.Array | None,
    attn_bias_type: Any,
    attn_mask_type: Any,
    qkv_layout: Any,
    softmax_type: Any,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int = 1,
    window_size: Sequence[int] | None = None,
    context_checkpoint_name: str = "context",
    softmax_offset: jax.Array | None = None,
) -> jax.Array:
    """As ``te_ffi_kernels.fused_attn``; JAX finds the gradients by itself."""
    del context_checkpoint_name
    return fused_attn_fwd(
        qkv,
        bias,
        softmax_offset,
        sequence_descriptor,
        seed,
        attn_bias_type,
        attn_mask_type,
        softmax_type,
        qkv_layout,
        scaling_factor,
        dropout_probability,
        is_training,
        max_segments_per_seq,
        window_size,
    )[0]
