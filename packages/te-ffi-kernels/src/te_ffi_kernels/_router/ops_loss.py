"""The loss that evens out how many tokens go to each expert."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import _op
from .._te.cotangents import nothing
from . import options as checks
from . import reference

_Config = tuple[int, float, int]  # topk, coeff, number of tokens


def fused_moe_aux_loss(
    probs: jax.Array, tokens_per_expert: jax.Array, topk: int, coeff: float
) -> jax.Array:
    """The load-balancing loss of a mixture of experts, in float32.

    ``E * coeff / (topk * T**2) * sum_e(sum_t(probs[t, e]) * tokens_per_expert[e])`` for T tokens
    and E experts, and 0 without tokens. As ``fused_moe_aux_loss`` of
    ``transformer_engine.jax.router``.

    Args:
        probs: float32, bfloat16 or float16 [tokens, experts]: scores of all experts, as
            ``fused_topk_with_score_function`` with `compute_aux_scores` gives them.
        tokens_per_expert: int32, int64, int16, float32 or bfloat16 [experts].
        topk: how many experts a token goes to.
        coeff: weight of the loss. As `topk`, it is part of the compiled program.

    Returns:
        A number of probs' dtype. Differentiable with respect to probs.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or value than above.
    """
    op = "fused_moe_aux_loss"
    checks.loss(op, probs, tokens_per_expert)
    config = (*checks.loss_options(op, topk, coeff), probs.shape[0])
    return _run(config, probs, tokens_per_expert)[0]


def fused_moe_aux_loss_fwd(
    probs: jax.Array, tokens_per_expert: jax.Array, topk: int, coeff: float
) -> tuple[jax.Array, jax.Array]:
    """As ``fused_moe_aux_loss``, with what its gradient needs.

    Args:
        probs: see there, as for all others.
        tokens_per_expert: see there.
        topk: see there.
        coeff: see there.

    Returns:
        The loss, and float32[2]: what the sum is multiplied with, and the loss in float32.

    Raises:
        TypeError, ValueError: as ``fused_moe_aux_loss``.
    """
    op = "fused_moe_aux_loss_fwd"
    checks.loss(op, probs, tokens_per_expert)
    config = (*checks.loss_options(op, topk, coeff), probs.shape[0])
    return _run(config, probs, tokens_per_expert)


def fused_moe_aux_loss_bwd(
    const_buf: jax.Array, tokens_per_expert: jax.Array, grad_aux_loss: jax.Array, num_tokens: int
) -> jax.Array:
    """The gradient of the probs of ``fused_moe_aux_loss_fwd``.

    Args:
        const_buf: float32[2], what the forward pass gave.
        tokens_per_expert: as in the forward pass.
        grad_aux_loss: the cotangent of the loss: a float32, bfloat16 or float16 number.
        num_tokens: how many tokens there are.

    Returns:
        [num_tokens, experts] of grad_aux_loss's dtype, the same for each token.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or value than above.
    """
    op = "fused_moe_aux_loss_bwd"
    checks.loss_gradient(op, const_buf, tokens_per_expert, grad_aux_loss)
    return _run_gradient(checks.tokens(op, num_tokens), const_buf, tokens_per_expert, grad_aux_loss)


def _forward_kernel(config: _Config, probs: jax.Array, tokens_per_expert: jax.Array) -> Any:
    topk, coeff, _ = config
    return _op.call(
        "fused_moe_aux_loss_forward",
        functools.partial(reference.loss, topk, coeff),
        (probs, tokens_per_expert),
        (
            jax.ShapeDtypeStruct(probs.shape[:-2], probs.dtype),
            jax.ShapeDtypeStruct((*probs.shape[:-2], 2), jnp.float32),
        ),
        topk=topk,
        coeff=np.float64(coeff),
    )


def _backward_kernel(tokens: int, *operands: jax.Array) -> jax.Array:
    _, counts, grad = operands
    shape = (*counts.shape[:-1], tokens, counts.shape[-1])
    return _op.call(
        "fused_moe_aux_loss_backward",
        functools.partial(reference.loss_gradient, tokens),
        operands,
        jax.ShapeDtypeStruct(shape, grad.dtype),
    )


def _batched(kernel: Any, config: Any, outputs: Any, *operands: jax.Array) -> Any:
    """vmap: a loss for each."""

    def fold(size: int, in_batched: Sequence[bool], *operands: jax.Array) -> Any:
        wide = [
            one if flag else jnp.broadcast_to(one, (size, *one.shape))
            for one, flag in zip(operands, in_batched, strict=True)
        ]
        return _batched(kernel, config, outputs, *wide), outputs

    return _op.batched(functools.partial(kernel, config), fold)(*operands)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(config: _Config, probs: jax.Array, tokens_per_expert: jax.Array) -> Any:
    return _batched(_forward_kernel, config, (True, True), probs, tokens_per_expert)


def _forward(config: _Config, probs: jax.Array, tokens_per_expert: jax.Array) -> Any:
    out = _differentiable(config, probs, tokens_per_expert)
    return out, (out[1], tokens_per_expert)


def _backward(config: _Config, saved: Any, cotangents: Any) -> Any:
    const_buf, counts = saved
    return _gradient(config[2], const_buf, counts, cotangents[0]), nothing(counts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gradient(tokens: int, *operands: jax.Array) -> jax.Array:
    return _batched(_backward_kernel, tokens, True, *operands)


def _gradient_forward(tokens: int, *operands: jax.Array) -> Any:
    return _gradient(tokens, *operands), operands


def _gradient_backward(tokens: int, saved: Any, ct: jax.Array) -> Any:
    const_buf, counts, grad = saved
    # The loss is linear in probs: what is saved doesn't depend on them but for the loss itself.
    pull = jax.vjp(lambda g: reference.loss_gradient(tokens, const_buf, counts, g), grad)[1]
    return nothing(const_buf), nothing(counts), *pull(ct)


_differentiable.defvjp(_forward, _backward)
_gradient.defvjp(_gradient_forward, _gradient_backward)
_run = jax.jit(_differentiable, static_argnums=0)
_run_gradient = jax.jit(_gradient, static_argnums=0)
