"""Softmax of scaled logits, with or without a mask."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ..batching import more_rows, widened
from ..op import Op, gradient_of
from ..partition import partition_rows
from . import config as checks
from . import reference
from .config import Config, SoftmaxFusionType

_SCALED = SoftmaxFusionType.SCALED
_MASKED = SoftmaxFusionType.SCALED_MASKED
_CAUSAL = SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED


def softmax(
    logits: jax.Array,
    mask: jax.Array | None = None,
    scale_factor: float = 1.0,
    softmax_fusion_type: SoftmaxFusionType = _SCALED,
) -> jax.Array:
    """Return the softmax of scaled logits along the last axis.

    As ``softmax`` of ``transformer_engine.jax.softmax``, without its limits: of sizes, of batches
    that are multiples of 4, and of float16 and bfloat16.

    Args:
        logits: float32, bfloat16 or float16 [..., q, k]; with a mask [..., heads, q, k].
        mask: uint8 or bool [b or 1, 1, q, k] for logits [b, heads, q, k]; 1 leaves a logit out
            (and nothing else does). Taken with SCALED_MASKED alone.
        scale_factor: factor of the logits, part of the compiled program.
        softmax_fusion_type: a ``SoftmaxFusionType`` or its value. With
            SCALED_UPPER_TRIANG_MASKED, row i has the columns 0 to i, whatever q and k are; the
            others aren't read.

    Returns:
        An array as logits, zero where a logit was left out: a row without any is all zeros. NaN or
        +inf among the logits of a row makes the row NaN, except what is left out. Differentiable
        with respect to logits.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or value than above.
    """
    config = checks.config("softmax", softmax_fusion_type, scale_factor)
    return _checked("softmax", config, logits, *((mask,) if config.fusion is _MASKED else ()))


def scaled_softmax_fwd(logits: jax.Array, scale_factor: float) -> jax.Array:
    """Return ``softmax`` with SCALED.

    Args:
        logits: float32, bfloat16 or float16 [..., q, k].
        scale_factor: a number of Python.

    Returns:
        An array as logits.

    Raises:
        TypeError, ValueError: as ``softmax``.
    """
    op = "scaled_softmax_fwd"
    return _checked(op, checks.config(op, _SCALED, scale_factor), logits)


def scaled_masked_softmax_fwd(logits: jax.Array, mask: jax.Array, scale_factor: float) -> jax.Array:
    """Return ``softmax`` with SCALED_MASKED.

    Args:
        logits: float32, bfloat16 or float16 [b, heads, q, k].
        mask: uint8 or bool [b or 1, 1, q, k]; 1 leaves a logit out.
        scale_factor: a number of Python.

    Returns:
        An array as logits.

    Raises:
        TypeError, ValueError: as ``softmax``.
    """
    op = "scaled_masked_softmax_fwd"
    return _checked(op, checks.config(op, _MASKED, scale_factor), logits, mask)


def scaled_upper_triang_masked_softmax_fwd(logits: jax.Array, scale_factor: float) -> jax.Array:
    """Return the softmax up to the diagonal: ``softmax`` with SCALED_UPPER_TRIANG_MASKED.

    Args:
        logits: float32, bfloat16 or float16 [..., q, k]. Row i has the columns 0 to i, also where
            q isn't k, which Transformer Engine refuses.
        scale_factor: a number of Python.

    Returns:
        An array as logits.

    Raises:
        TypeError, ValueError: as ``softmax``.
    """
    op = "scaled_upper_triang_masked_softmax_fwd"
    return _checked(op, checks.config(op, _CAUSAL, scale_factor), logits)


def scaled_softmax_bwd(
    dz: jax.Array, softmax_out: jax.Array, logits: Any, scale_factor: float
) -> jax.Array:
    """Return the gradient of the logits of ``scaled_softmax_fwd``.

    Args:
        dz: cotangent of the result: float32, bfloat16 or float16 [..., q, k].
        softmax_out: the result.
        logits: not used; may be None.
        scale_factor: that of the forward pass.

    Returns:
        An array as dz: ``scale_factor * softmax_out * (dz - sum(dz * softmax_out))``.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or value than above.
    """
    del logits
    return _checked_gradient("scaled_softmax_bwd", _SCALED, scale_factor, dz, softmax_out)


def scaled_masked_softmax_bwd(
    dz: jax.Array, softmax_out: jax.Array, logits: Any, mask: Any, scale_factor: float
) -> jax.Array:
    """Return the gradient of the logits of ``scaled_masked_softmax_fwd``.

    Args:
        dz: cotangent of the result: float32, bfloat16 or float16 [..., q, k].
        softmax_out: the result, which is zero where the mask is 1; so is the gradient.
        logits: not used; may be None.
        mask: not used; may be None.
        scale_factor: that of the forward pass.

    Returns:
        An array as dz.

    Raises:
        TypeError, ValueError: as ``scaled_softmax_bwd``.
    """
    del logits, mask
    return _checked_gradient("scaled_masked_softmax_bwd", _MASKED, scale_factor, dz, softmax_out)


def scaled_upper_triang_masked_softmax_bwd(
    dz: jax.Array, softmax_out: jax.Array, logits: Any, scale_factor: float
) -> jax.Array:
    """Return the gradient of the logits of ``scaled_upper_triang_masked_softmax_fwd``.

    Args:
        dz: cotangent of the result: float32, bfloat16 or float16 [..., q, k]. What is beyond the
            diagonal isn't read.
        softmax_out: the result; the same holds for it.
        logits: not used; may be None.
        scale_factor: that of the forward pass.

    Returns:
        An array as dz.

    Raises:
        TypeError, ValueError: as ``scaled_softmax_bwd``.
    """
    del logits
    op = "scaled_upper_triang_masked_softmax_bwd"
    return _checked_gradient(op, _CAUSAL, scale_factor, dz, softmax_out)


def _checked(op: str, config: Config, logits: jax.Array, *mask: jax.Array | None) -> jax.Array:
    checks.logits(op, "logits", logits, 3 if mask else 2)
    return _SOFTMAX(config, logits, *(checks.mask(op, one, logits) for one in mask))


def _checked_gradient(
    op: str, fusion: SoftmaxFusionType, scale: float, dz: jax.Array, softmax_out: jax.Array
) -> jax.Array:
    config = checks.config(op, fusion, scale)
    checks.gradient(op, dz, softmax_out)
    return _GRADIENT(config, dz, softmax_out)


def _like(config: Config, x: jax.Array, *rest: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def _attributes(config: Config, *_: jax.Array) -> dict[str, Any]:
    return {"scale_factor": np.float64(config.scale)}


def _partition(config: Config, block: Any, x: jax.Array, *mask: jax.Array) -> Any:
    """Share out rows, except where a diagonal counts them."""
    names, whole = _axes(config, x)
    given = [names]
    for one in mask:
        leading = one.shape[:-3]
        if leading == x.shape[:-3]:
            given.append([*names[:-3], "one", "q", "k"])
        else:
            given.append([*(f"m{i}" for i in range(len(leading))), "one", "q", "k"])
            whole |= set(given[-1][:-3])
            if math.prod(leading) != 1:  # masks repeat
                whole |= set(names[:-3])
        whole |= {"one"}
    return partition_rows(functools.partial(block, config), given, [names], whole)


def _partition_gradient(config: Config, block: Any, *operands: jax.Array) -> Any:
    names, whole = _axes(config, operands[0])
    return partition_rows(functools.partial(block, config), [names, names], [names], whole)


def _axes(config: Config, x: jax.Array) -> tuple[list[str], set[str]]:
    """Return the logits' axis names, and those each device has whole."""
    names = [*(f"b{i}" for i in range(x.ndim - 2)), "q", "k"]
    return names, {"k", "q"} if config.causal else {"k"}


def _batch(run: Any, config: Config, size: int, in_batched: Any, *operands: jax.Array) -> Any:
    """Make the mapped axis one more axis of the batch."""
    if in_batched[1:] != (True,):
        return run(config, *operands), True  # masks repeat
    x, mask = widened(size, in_batched, *operands)
    batch, masks = math.prod(x.shape[1:-3]), math.prod(mask.shape[1:-3])
    if masks == 1:
        # Heads share a mask, and batches become heads.
        folded = x.reshape(size, batch * x.shape[-3], *x.shape[-2:])
        return run(config, folded, mask.reshape(size, *mask.shape[-3:])).reshape(x.shape), True
    repeats = (size, batch // masks if masks else 1, masks, *mask.shape[-3:])
    mask = mask.reshape(size, 1, masks, *mask.shape[-3:])
    return run(config, x, jnp.broadcast_to(mask, repeats)), True


_SOFTMAX = Op(
    lambda config: f"{config.op}_forward",
    reference.forward,
    results=_like,
    attributes=_attributes,
    partition=_partition,
    batch=_batch,
    save=lambda config, operands, out: (out, operands[1:]),
    gradient=lambda config, saved, dz: (_GRADIENT(config, dz, saved[0]), *(None for _ in saved[1])),
)
_GRADIENT = Op(
    lambda config: f"{config.op}_backward",
    reference.backward,
    results=_like,
    attributes=_attributes,
    partition=_partition_gradient,
    batch=more_rows,
    gradient=gradient_of(reference.backward),
)
