"""The static arguments of the softmax ops, and checks of all arguments."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import jax
import jax.numpy as jnp

from .. import checks


class SoftmaxFusionType(enum.Enum):
    """Which logits a softmax takes."""

    SCALED = "scaled"
    """All."""
    SCALED_MASKED = "scaled_masked"
    """Those where a mask isn't 1."""
    SCALED_UPPER_TRIANG_MASKED = "scaled_upper_triang_masked"
    """Those up to the diagonal: row i has the columns 0 to i."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The static arguments of a softmax."""

    fusion: SoftmaxFusionType
    scale: float

    @property
    def op(self) -> str:
        """Return the name of the kernels' ops without their direction."""
        return f"{self.fusion.value}_softmax"

    @property
    def causal(self) -> bool:
        """Return whether the columns of a row depend on its index."""
        return self.fusion is SoftmaxFusionType.SCALED_UPPER_TRIANG_MASKED


def config(op: str, given: Any, scale_factor: Any) -> Config:
    """Return the fusion and the scale.

    Raises:
        TypeError, ValueError: as ``te_ffi_kernels.softmax``.
    """
    scale = checks.number(op, "scale_factor", scale_factor)
    return Config(checks.member(op, "softmax_fusion_type", given, SoftmaxFusionType), scale)


def logits(op: str, name: str, given: jax.Array, axes: int) -> None:
    """Raise unless an array is float with enough axes."""
    checks.dtype(op, name, given.dtype, checks.FLOATS)
    if given.ndim < axes:
        wanted = "[..., heads, q, k]" if axes == 3 else "[..., q, k]"
        raise ValueError(f"{op}: {name} must have shape {wanted}, got {given.shape}")


def mask(op: str, given: jax.Array | None, x: jax.Array) -> jax.Array:
    """Return the mask, for logits x.

    Raises:
        TypeError, ValueError: it isn't one.
    """
    if given is None:
        raise ValueError(f"{op}: mask must be uint8 or bool, 1 for masked, got None")
    checks.dtype(op, "mask", given.dtype, (jnp.uint8, jnp.bool_))
    batch = math.prod(x.shape[:-3])
    fits = given.ndim >= 3 and given.shape[-3:] == (1, *x.shape[-2:])
    if not fits or math.prod(given.shape[:-3]) not in (1, batch):
        raise ValueError(
            f"{op}: mask must have shape {(batch, 1, *x.shape[-2:])}, or 1 instead of the "
            f"first, got {given.shape}. Logits have shape {x.shape}, and their heads "
            "share a mask."
        )
    return given


def gradient(op: str, dz: jax.Array, softmax_out: jax.Array) -> None:
    """Raise where two arrays aren't a softmax and its cotangent."""
    logits(op, "dz", dz, 2)
    checks.dtype(op, "softmax_out", softmax_out.dtype, (dz.dtype,))
    if softmax_out.shape != dz.shape:
        raise ValueError(
            f"{op}: softmax_out must have shape {dz.shape}, as dz, got {softmax_out.shape}"
        )
