"""Fused attention: forward, backward, and both as a differentiable function."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from ..op import Op
from . import operands, ring
from .config import Config, check_array, check_bias, make_config, sizes_of
from .kernels import BACKWARD, FORWARD, forward_in_jax
from .sequence import SequenceDescriptor
from .types import AttnSoftmaxType

Qkv = tuple[jax.Array, ...]


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
    context_parallel_axis: str | Sequence[str] = (),
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return attention, and what its gradient needs. Not differentiable: see ``fused_attn``.

    The arguments are those of ``fused_attn``.

    Returns:
        The result, [b, sq, h, dv] in the dtype of qkv; the natural logarithm of each softmax's sum,
        float32 [b, h, sq, 1] (THD: [b, sq, h, 1]), -inf for queries that see no key; and the random
        state, uint32 [seed.shape[0], 4]: seed and offset.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``fused_attn``.
    """
    op = "fused_attn_fwd"
    kinds = (attn_bias_type, attn_mask_type, qkv_layout, softmax_type)
    config = make_config(
        op, *kinds, scaling_factor, dropout_probability, is_training, max_segments_per_seq,
        window_size, context_parallel_axis,
    )  # fmt: skip
    given = (qkv, bias, softmax_offset, sequence_descriptor, seed)
    return _forward_kernel(config, *_prepared(op, config, *given))


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
    context_parallel_axis: str | Sequence[str] = (),
) -> tuple[Qkv, jax.Array | None, jax.Array | None]:
    """Return the gradients of attention. Probabilities are computed again, block by block.

    Arguments that are not listed are those of ``fused_attn_fwd``; ``softmax_aux``, ``rng_state``
    and ``output`` are what it returned.

    Args:
        doutput: the gradient of the output.

    Returns:
        The gradients of the arrays of `qkv`, of the bias (None without one) and of the softmax
        offset (None for the vanilla softmax).

    Raises:
        TypeError, ValueError, NotImplementedError: as ``fused_attn``.
    """
    op = "fused_attn_bwd"
    kinds = (attn_bias_type, attn_mask_type, qkv_layout, softmax_type)
    config = make_config(
        op, *kinds, scaling_factor, dropout_probability, is_training, max_segments_per_seq,
        window_size, context_parallel_axis,
    )  # fmt: skip
    given = _prepared(op, config, qkv, bias, softmax_offset, sequence_descriptor, rng_state)
    sizes, dtype = sizes_of(op, tuple(qkv), config.layout), given[0].dtype
    check_array(op, "softmax_aux", softmax_aux, sizes.aux(config.layout), jnp.float32)
    check_array(op, "output", output, sizes.out, dtype)
    check_array(op, "doutput", doutput, sizes.out, dtype)
    saved = (softmax_aux, rng_state, output, doutput)
    *grads, bias_grad, offset_grad = _backward_kernel(config, *given[:5], *saved, *given[6:])
    no_offset = config.softmax_type is AttnSoftmaxType.VANILLA_SOFTMAX
    return (
        tuple(grads[: len(qkv)]),
        None if bias is None else bias_grad,
        None if no_offset else offset_grad,
    )


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
    context_parallel_axis: str | Sequence[str] = (),
) -> jax.Array:
    """Attend: ``dropout(softmax(scale * q k^T, masked)) v`` for each head.

    Neither direction keeps an array of (queries x keys): blocks of scores are computed as they are
    needed (Dao et al. 2022, "FlashAttention"; https://arxiv.org/abs/2205.14135). Numbers are read
    as float32, or multiplied as bfloat16 pairs where the processor does that; sums are float32.

    Args:
        qkv: float32, bfloat16 or float16 arrays, as `qkv_layout` has them: queries [b, sq, h, d],
            keys [b, skv, g, d] and values [b, skv, g, dv] (h is a multiple of g: each head of keys
            is for h / g heads of queries), or packed.
        bias: None, or [1 or b, 1 or h, sq, skv] of the dtype of `qkv`. It has a gradient.
        sequence_descriptor: where sequences are; needed with masks of padding and THD layouts.
        seed: uint32 of two numbers at least, or a key; needed with dropout. The words are those of
            Philox 4x32-10 with the seed as the key; their counter is (key's place // 4, query's
            place, segment * h + head, 0), and the word that of key's place % 4.
        attn_bias_type: an ``AttnBiasType``, its name or its number; so are the next three.
        attn_mask_type: an ``AttnMaskType``.
        qkv_layout: a ``QKVLayout``.
        softmax_type: an ``AttnSoftmaxType``.
        scaling_factor: a static number.
        dropout_probability: in [0, 1).
        is_training: whether there is dropout.
        max_segments_per_seq: for THD layouts; segments beyond it are not looked at.
        window_size: (left, right): how many keys before and after its own place a query sees (its
            own place as `attn_mask_type` aligns it); -1 is without end. A causal mask is one of
            right 0.
        context_checkpoint_name: of what is saved for the gradient, for policies of
            ``jax.checkpoint``.
        softmax_offset: float32 [1, h, 1, 1]; it has a gradient with LEARNABLE_SOFTMAX.
        context_parallel_axis: inside of a ``shard_map``, the mesh axis (or axes) along which both
            sequences are shared out, a device's block after that of the one before. Arrays of
            queries and keys are blocks then, and segment ids those of their tokens; a bias has the
            block's rows and all columns; lengths are those of whole sequences. Outside of
            ``shard_map`` the operands' shardings decide.

    Returns:
        [b, sq, h, dv], in the dtype of `qkv`. It is 0 for queries that see no key or are padding.
        Differentiable with respect to `qkv`, `bias` and `softmax_offset`.

    Raises:
        TypeError, ValueError: naming the argument.
        NotImplementedError: a bias with a THD layout; with `context_parallel_axis` a THD layout,
            dropout, or PADDING_CAUSAL_BOTTOM_RIGHT_MASK.
    """
    op = "fused_attn"
    kinds = (attn_bias_type, attn_mask_type, qkv_layout, softmax_type)
    config = make_config(
        op, *kinds, scaling_factor, dropout_probability, is_training, max_segments_per_seq,
        window_size, context_parallel_axis,
    )  # fmt: skip
    config = dataclasses.replace(config, checkpoint_name=context_checkpoint_name)
    given = (qkv, bias, softmax_offset, sequence_descriptor, seed)
    return _ATTENTION(config, *_prepared(op, config, *given))


def _prepared(
    op: str,
    config: Config,
    qkv: Sequence[jax.Array],
    bias: jax.Array | None,
    softmax_offset: jax.Array | None,
    sequence_descriptor: SequenceDescriptor | None,
    seed: jax.Array | None,
) -> tuple[jax.Array, ...]:
    """Return the operands of the forward kernel, checked."""
    arrays = tuple(qkv)
    sizes = sizes_of(op, arrays, config.layout)
    parts = lax.axis_size(config.context_axes) if config.context_axes else 1
    check_bias(op, config, sizes, bias, arrays[0].dtype, parts)
    return (
        *operands.arrays(arrays),
        jnp.zeros((0,), arrays[0].dtype) if bias is None else bias,
        operands.softmax_offset(op, config, sizes.heads, softmax_offset),
        operands.seed(op, config, seed),
        *operands.sequences(op, config, sizes, sequence_descriptor),
    )


def _forward_kernel(config: Config, *given: jax.Array) -> Any:
    """Call the forward kernel, or a ring of them."""
    return _around(ring.forward, FORWARD, config)(*given)


def _backward_kernel(config: Config, *given: jax.Array) -> Any:
    """Call the backward kernel, or a ring of them."""
    return _around(ring.backward, BACKWARD, config)(*given)


def _around(along: Callable[..., Any], run: Callable[..., Any], config: Config) -> Any:
    axes = config.context_axes
    return functools.partial(along, run, axes, config) if axes else functools.partial(run, config)


def _forward(config: Config, *given: jax.Array) -> Any:
    found = _forward_kernel(config, *given)
    out, aux, state = (checkpoint_name(x, config.checkpoint_name) for x in found)
    return out, (given, aux, state, out)


def _gradient(config: Config, saved: Any, grad: jax.Array) -> Any:
    given, *rest = saved
    *grads, offset_grad = _backward_kernel(config, *given[:5], *rest, grad, *given[6:])
    learns = config.softmax_type is AttnSoftmaxType.LEARNABLE_SOFTMAX
    return *grads, offset_grad if learns else None, *(None,) * 5


_ATTENTION = Op(
    "fused_attn",
    lambda config, *given: _around(ring.forward, forward_in_jax, config)(*given)[0],
    forward=_forward,
    gradient=_gradient,
)
