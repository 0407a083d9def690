"""Options of the router, with checks that name op and argument."""

from __future__ import annotations

import dataclasses
import enum
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .. import checks


class ScoreFunction(enum.IntEnum):
    """How scores are made of logits, with Transformer Engine's numbers."""

    SIGMOID = 0
    SOFTMAX = 1
    SQRTSOFTPLUS = 2
    """sqrt(log(1 + e^x)); of Transformer Engine's kernels, not yet of its JAX functions."""


class RoutingMapFormat(enum.IntEnum):
    """What a routing map looks like, with Transformer Engine's numbers."""

    BYTEMAP = 0
    """bool [tokens, experts]."""
    BITMAP_U8 = 1
    """uint8 [tokens, ceil(experts / 8)]: bit e % 8 of byte e // 8 is that of expert e."""


@dataclasses.dataclass(frozen=True)
class Options:
    """Static options of the router; defaults for dense scores."""

    topk: int
    score: ScoreFunction
    format: RoutingMapFormat
    dense: bool
    pre_softmax: bool = False
    groups: int = -1
    group_topk: int = -1
    scaling: float = 1.0

    @property
    def in_groups(self) -> bool:
        """Return whether experts are chosen group by group."""
        return self.group_topk > 0

    @property
    def attributes(self) -> dict[str, Any]:
        """Return the attributes of both targets."""
        return {
            "topk": self.topk,
            "use_pre_softmax": int(self.pre_softmax),
            "scaling_factor": np.float64(self.scaling),
            "score_function": int(self.score),
            "compute_aux_scores": int(self.dense),
            "routing_map_format": int(self.format),
        }

    @property
    def group_attributes(self) -> dict[str, Any]:
        """Return the attributes of the forward pass alone."""
        return {"num_groups": self.groups, "group_topk": self.group_topk}

    def map_of(self, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
        """Return the routing map for logits of a shape."""
        if self.format is RoutingMapFormat.BITMAP_U8:
            return jax.ShapeDtypeStruct((*shape[:-1], -(-shape[-1] // 8)), jnp.uint8)
        return jax.ShapeDtypeStruct(shape, jnp.bool_)


def options(
    op: str,
    topk: Any,
    use_pre_softmax: Any,
    num_groups: Any,
    group_topk: Any,
    scaling_factor: Any,
    score_function: Any,
    compute_aux_scores: Any,
    routing_map_format: Any,
) -> Options:
    """Return the options of a call.

    Raises:
        TypeError, ValueError: as ``te_ffi_kernels.fused_topk_with_score_function``.
    """
    count = whole(op, "topk", topk)
    if count < 1:
        raise ValueError(f"{op}: topk must be positive, got {count}")
    score = checks.member(op, "score_function", score_function, ScoreFunction)
    layout = checks.member(op, "routing_map_format", routing_map_format, RoutingMapFormat)
    scaling = checks.number(op, "scaling_factor", scaling_factor)
    if compute_aux_scores:
        return Options(count, score, layout, True)
    groups = whole(op, "num_groups", num_groups)
    chosen = whole(op, "group_topk", group_topk)
    if chosen <= 0:
        return Options(count, score, layout, False, bool(use_pre_softmax), scaling=scaling)
    if count % chosen:
        raise ValueError(f"{op}: group_topk must divide topk, {count}, got {chosen}")
    if groups < chosen:
        raise ValueError(f"{op}: num_groups must be at least group_topk, {chosen}, got {groups}")
    return Options(count, score, layout, False, bool(use_pre_softmax), groups, chosen, scaling)


def experts(op: str, name: str, array: jax.Array, given: Options) -> None:
    """Raise where an array isn't [..., experts] of floats with enough experts."""
    checks.dtype(op, name, array.dtype, checks.FLOATS)
    if array.ndim < 1:
        raise ValueError(f"{op}: {name} must have shape [tokens, experts], got ()")
    count = array.shape[-1]
    if given.topk > count:
        raise ValueError(
            f"{op}: topk must not be above the number of experts, {count}, got "
            f"{given.topk}. {name} has shape {array.shape}."
        )
    if not given.in_groups:
        return
    if count % given.groups:
        raise ValueError(
            f"{op}: num_groups must divide the number of experts, {count}, got {given.groups}"
        )
    if given.topk // given.group_topk > count // given.groups:
        raise ValueError(
            f"{op}: topk / group_topk must not be above the {count // given.groups} experts of a "
            f"group, got {given.topk} / {given.group_topk}"
        )


def bias(op: str, given: jax.Array | None, logits: jax.Array, of: Options) -> jax.Array:
    """Return the bias; an empty array where unused."""
    if given is None or of.dense or given.size == 0:
        return jnp.zeros((0,), logits.dtype)
    if of.score is ScoreFunction.SOFTMAX:
        raise ValueError(
            f"{op}: expert_bias must be None with score_function SOFTMAX, got {given.shape}. It is "
            "for SIGMOID and SQRTSOFTPLUS."
        )
    checks.dtype(op, "expert_bias", given.dtype, checks.FLOATS)
    if given.shape != logits.shape[-1:]:
        raise ValueError(
            f"{op}: expert_bias must have shape {logits.shape[-1:]}, got {given.shape}. "
            "Give one number for each expert."
        )
    return given


def gradient(
    op: str, routing_map: jax.Array, saved: jax.Array, grad: jax.Array, of: Options
) -> None:
    """Raise where arrays aren't what the forward pass gave, and a cotangent."""
    experts(op, "grad_probs", grad, of)
    checks.dtype(op, "saved_scores", saved.dtype, (jnp.float32,))
    checks.shape(op, "saved_scores", saved, grad.shape, "that of grad_probs")
    if of.dense:
        return
    wanted = of.map_of(grad.shape)
    allowed = (jnp.uint8,) if wanted.dtype == jnp.uint8 else (jnp.bool_, jnp.uint8)
    checks.dtype(op, "routing_map", routing_map.dtype, allowed)
    checks.shape(op, "routing_map", routing_map, wanted.shape, f"as {of.format.name} has it")


def loss(op: str, probs: jax.Array, tokens_per_expert: jax.Array) -> None:
    """Raise where arrays aren't probabilities and counts."""
    checks.dtype(op, "probs", probs.dtype, checks.FLOATS)
    if probs.ndim != 2:
        raise ValueError(f"{op}: probs must have shape [tokens, experts], got {probs.shape}")
    counts(op, tokens_per_expert)
    checks.shape(op, "tokens_per_expert", tokens_per_expert, probs.shape[1:], "one for each expert")


def loss_gradient(
    op: str, const_buf: jax.Array, tokens_per_expert: jax.Array, grad: jax.Array
) -> None:
    """Raise where arrays aren't what the forward pass gave, and a cotangent."""
    checks.dtype(op, "const_buf", const_buf.dtype, (jnp.float32,))
    checks.shape(op, "const_buf", const_buf, (2,), "as the forward pass gives it")
    counts(op, tokens_per_expert)
    if tokens_per_expert.ndim != 1:
        raise ValueError(
            f"{op}: tokens_per_expert must have shape [experts], got {tokens_per_expert.shape}"
        )
    checks.dtype(op, "grad_aux_loss", grad.dtype, checks.FLOATS)
    checks.shape(op, "grad_aux_loss", grad, (), "one number")


def loss_options(op: str, topk: Any, coeff: Any) -> tuple[int, float]:
    """Return the options of the loss."""
    count = whole(op, "topk", topk)
    if count < 1:
        raise ValueError(f"{op}: topk must be positive, got {count}")
    return count, checks.number(op, "coeff", coeff)


def tokens(op: str, given: Any) -> int:
    """Return a number of tokens."""
    found = whole(op, "num_tokens", given)
    if found < 0:
        raise ValueError(f"{op}: num_tokens must not be negative, got {found}")
    return found


def counts(op: str, given: jax.Array) -> None:
    """Raise where an array isn't of a dtype that counts can have."""
    allowed = (jnp.int32, jnp.int64, jnp.int16, jnp.float32, jnp.bfloat16)
    checks.dtype(op, "tokens_per_expert", given.dtype, allowed)


def whole(op: str, name: str, given: Any) -> int:
    """Return an integer."""
    try:
        return operator.index(given)
    except TypeError:
        raise TypeError(
            f"{op}: {name} must be an integer of Python, got {type(given).__name__}"
        ) from None


def coefficient(tokens: int, count: int, topk: int, coeff: float) -> float:
    """Return the factor of the loss; 0 without tokens."""
    return count * coeff / topk / tokens / tokens if tokens else math.copysign(0.0, coeff)
