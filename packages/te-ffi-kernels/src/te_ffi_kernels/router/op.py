"""The experts that tokens go to, and their weights."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

from ..batching import more_rows
from ..op import Op
from ..partition import partition_rows
from . import config as checks
from . import reference
from .config import Options, RoutingMapFormat, ScoreFunction


def fused_topk_with_score_function(
    logits: jax.Array,
    topk: int,
    use_pre_softmax: bool = False,
    num_groups: int = -1,
    group_topk: int = -1,
    scaling_factor: float = 1.0,
    score_function: Any = ScoreFunction.SOFTMAX,
    expert_bias: jax.Array | None = None,
    compute_aux_scores: bool = False,
    routing_map_format: Any = RoutingMapFormat.BYTEMAP,
) -> tuple[jax.Array, jax.Array]:
    """Choose experts for tokens by score, in float32.

    As ``fused_topk_with_score_function`` of ``transformer_engine.jax.router``. All but the arrays
    is part of the compiled program.

    Args:
        logits: float32, bfloat16 or float16 [tokens, experts]; there may be more axes before.
        topk: how many experts a token goes to. Of equal scores the lower index is chosen.
        use_pre_softmax: with SOFTMAX, whether it comes before the choice, over all experts; after
            it, over those chosen, otherwise.
        num_groups: how many groups of neighbours the experts are in. Used with `group_topk` alone.
        group_topk: how many groups the experts of a token are from: those with the largest sum of
            their best ``topk / group_topk`` scores. 0 or less: no groups.
        scaling_factor: factor of the weights, applied last.
        score_function: a ``ScoreFunction``, its name or its number. With SIGMOID and SQRTSOFTPLUS,
            the weights of a token are divided by their sum, if `topk` isn't 1.
        expert_bias: float32, bfloat16 or float16 [experts], added to scores for the choice, not to
            weights; not with SOFTMAX.
        compute_aux_scores: whether scores of all experts are wanted, for ``fused_moe_aux_loss``:
            of SOFTMAX over all, or divided by their sum. Then `use_pre_softmax`, `num_groups`,
            `group_topk`, `scaling_factor` and `expert_bias` have no effect.
        routing_map_format: a ``RoutingMapFormat``, its name or its number.

    Returns:
        The weights, as logits, zero for experts that aren't chosen (with `compute_aux_scores` all
        scores); and the routing map: bool [tokens, experts], or a bit for each expert in uint8
        [tokens, ceil(experts / 8)], the lowest bit first. The first is differentiable with respect
        to logits.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or value than above.
    """
    op = "fused_topk_with_score_function"
    given = (use_pre_softmax, num_groups, group_topk, scaling_factor, score_function)
    of = checks.options(op, topk, *given, compute_aux_scores, routing_map_format)
    checks.experts(op, "logits", logits, of)
    return _ROUTE(of, logits, checks.bias(op, expert_bias, logits, of))[:2]


def fused_topk_with_score_function_fwd(
    logits: jax.Array,
    topk: int,
    use_pre_softmax: bool,
    num_groups: int,
    group_topk: int,
    scaling_factor: float,
    score_function: Any,
    expert_bias: jax.Array | None,
    compute_aux_scores: bool = False,
    routing_map_format: Any = RoutingMapFormat.BYTEMAP,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Choose experts as ``fused_topk_with_score_function``, with what its gradient needs.

    The arguments are those of ``fused_topk_with_score_function``; ``expert_bias`` may also be
    empty.

    Returns:
        The weights or scores, the routing map, and float32 as logits for
        ``fused_topk_with_score_function_bwd``: the sigmoids; the softmax, where it's over those
        chosen with -inf for the others; the logits with SQRTSOFTPLUS.

    Raises:
        TypeError, ValueError: as ``fused_topk_with_score_function``.
    """
    op = "fused_topk_with_score_function_fwd"
    given = (use_pre_softmax, num_groups, group_topk, scaling_factor, score_function)
    of = checks.options(op, topk, *given, compute_aux_scores, routing_map_format)
    checks.experts(op, "logits", logits, of)
    return _ROUTE(of, logits, checks.bias(op, expert_bias, logits, of))


def fused_topk_with_score_function_bwd(
    routing_map: jax.Array,
    saved_scores: jax.Array,
    grad_probs: jax.Array,
    topk: int,
    use_pre_softmax: bool,
    scaling_factor: float,
    score_function: Any,
    compute_aux_scores: bool = False,
    routing_map_format: Any = RoutingMapFormat.BYTEMAP,
) -> jax.Array:
    """Return the gradient of the logits of ``fused_topk_with_score_function_fwd``.

    Args:
        routing_map: what the forward pass gave; not used with `compute_aux_scores`.
        saved_scores: what the forward pass gave, float32.
        grad_probs: the cotangent of the weights or scores: float32, bfloat16 or float16.

    The other arguments are those of the forward pass.

    Returns:
        An array as grad_probs.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or value than above.
    """
    op = "fused_topk_with_score_function_bwd"
    given = (use_pre_softmax, -1, -1, scaling_factor, score_function)
    of = checks.options(op, topk, *given, compute_aux_scores, routing_map_format)
    checks.gradient(op, routing_map, saved_scores, grad_probs, of)
    return _GRADIENT(of, routing_map, saved_scores, grad_probs)


def _results(of: Options, logits: jax.Array, *rest: jax.Array) -> Any:
    return (
        jax.ShapeDtypeStruct(logits.shape, logits.dtype),
        of.map_of(logits.shape),
        jax.ShapeDtypeStruct(logits.shape, jnp.float32),
    )


def _axes(of: Options, x: jax.Array) -> tuple[list[str], list[str]]:
    """Return names of the axes of logits and of the routing map."""
    tokens = [f"t{i}" for i in range(x.ndim - 1)]
    in_bytes = of.format is RoutingMapFormat.BITMAP_U8
    return [*tokens, "experts"], [*tokens, "bytes" if in_bytes else "experts"]


def _partition(of: Options, block: Any, logits: jax.Array, bias: jax.Array) -> Any:
    """Share out tokens."""
    tokens, routing_map = _axes(of, logits)
    return partition_rows(
        functools.partial(block, of),
        [tokens, ["bias"]],
        [tokens, routing_map, tokens],
        {"experts", "bytes", "bias"},
    )


def _batch(run: Any, of: Options, size: int, in_batched: Any, *operands: jax.Array) -> Any:
    """Make the mapped axis one more axis of tokens."""
    if in_batched[1]:
        return NotImplemented  # a bias for each: one by one
    return run(of, *operands), (True,) * 3


_ROUTE = Op(
    "fused_topk_with_score_function_forward",
    reference.forward,
    results=_results,
    attributes=lambda of, *_: of.attributes | of.group_attributes,
    partition=_partition,
    batch=_batch,
    save=lambda of, operands, found: found[1:],
    gradient=lambda of, saved, cts: (_GRADIENT(of, *saved, cts[0]), None),
)


def _gradient_partition(of: Options, block: Any, *operands: jax.Array) -> Any:
    """Share out tokens."""
    tokens, routing_map = _axes(of, operands[2])
    given, whole = operands[0], {"experts", "bytes"}
    if of.dense and given.ndim != len(routing_map):
        # The kernel ignores it, so it may have any axes.
        routing_map = [f"m{i}" for i in range(given.ndim)]
        whole |= set(routing_map)
    run = functools.partial(block, of)
    return partition_rows(run, [routing_map, tokens, tokens], [tokens], whole)


def _second_gradient(of: Options, saved: Any, ct: jax.Array) -> Any:
    raise NotImplementedError(
        "fused_topk_with_score_function_bwd has no gradient itself: the router can be "
        "differentiated once. Take reference.fused_topk_with_score_function for more"
    )


_GRADIENT = Op(
    "fused_topk_with_score_function_backward",
    reference.backward,
    results=lambda of, *operands: jax.ShapeDtypeStruct(operands[2].shape, operands[2].dtype),
    attributes=lambda of, *_: of.attributes,
    partition=_gradient_partition,
    batch=more_rows,
    save=lambda *_: (),
    gradient=_second_gradient,
)
