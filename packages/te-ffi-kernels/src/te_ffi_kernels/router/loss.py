"""The loss that evens out how many tokens go to each expert."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..batching import more_rows
from ..op import Op
from . import config as checks
from . import reference


def fused_moe_aux_loss(
    probs: jax.Array, tokens_per_expert: jax.Array, topk: int, coeff: float
) -> jax.Array:
    """Return the load-balancing loss of a mixture of experts, in float32.

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
    config = _Loss(*checks.loss_options(op, topk, coeff), probs.shape[0])
    return _LOSS(config, probs, tokens_per_expert)[0]


def fused_moe_aux_loss_fwd(
    probs: jax.Array, tokens_per_expert: jax.Array, topk: int, coeff: float
) -> tuple[jax.Array, jax.Array]:
    """Return ``fused_moe_aux_loss``, with what its gradient needs.

    The arguments are those of ``fused_moe_aux_loss``.

    Returns:
        The loss, and float32[2]: what the sum is multiplied with, and the loss in float32.

    Raises:
        TypeError, ValueError: as ``fused_moe_aux_loss``.
    """
    op = "fused_moe_aux_loss_fwd"
    checks.loss(op, probs, tokens_per_expert)
    config = _Loss(*checks.loss_options(op, topk, coeff), probs.shape[0])
    return _LOSS(config, probs, tokens_per_expert)


def fused_moe_aux_loss_bwd(
    const_buf: jax.Array, tokens_per_expert: jax.Array, grad_aux_loss: jax.Array, num_tokens: int
) -> jax.Array:
    """Return the gradient of the probs of ``fused_moe_aux_loss_fwd``.

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
    return _GRADIENT(checks.tokens(op, num_tokens), const_buf, tokens_per_expert, grad_aux_loss)


@dataclasses.dataclass(frozen=True)
class _Loss:
    """The static arguments of the loss."""

    topk: int
    coeff: float
    tokens: int


def _results(of: _Loss, probs: jax.Array, counts: jax.Array) -> Any:
    return (
        jax.ShapeDtypeStruct(probs.shape[:-2], probs.dtype),
        jax.ShapeDtypeStruct((*probs.shape[:-2], 2), jnp.float32),
    )


_LOSS = Op(
    "fused_moe_aux_loss_forward",
    lambda of, probs, counts: reference.loss(of.topk, of.coeff, probs, counts),
    results=_results,
    attributes=lambda of, *_: {"topk": of.topk, "coeff": np.float64(of.coeff)},
    batch=more_rows,
    save=lambda of, operands, found: (found[1], operands[1]),
    gradient=lambda of, saved, cts: (_GRADIENT(of.tokens, *saved, cts[0]), None),
)


def _second_gradient(tokens: int, saved: Any, ct: jax.Array) -> Any:
    const_buf, counts, grad = saved
    # The loss is linear in probs: of what is saved, the gradient uses nothing that depends on them.
    pull = jax.vjp(lambda g: reference.loss_gradient(tokens, const_buf, counts, g), grad)[1]
    return None, None, *pull(ct)


_GRADIENT = Op(
    "fused_moe_aux_loss_backward",
    reference.loss_gradient,
    results=lambda tokens, _, counts, grad: jax.ShapeDtypeStruct(
        (*counts.shape[:-1], tokens, counts.shape[-1]), grad.dtype
    ),
    batch=more_rows,
    gradient=_second_gradient,
)
