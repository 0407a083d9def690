"""The factors of a matmul: their contracted axes and scales."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import checks
from ..quantize import arguments
from ..quantize.modes import ScalingMode, positive_axis, scale_shape


@dataclasses.dataclass(frozen=True)
class Side:
    """The layout of a factor.

    Attributes:
        shape: its shape.
        boundary: number of axes that are flattened to the first axis of a matrix.
        leading: whether the contracted axes are those before the boundary.
    """

    shape: tuple[int, ...]
    boundary: int
    leading: bool

    @property
    def contracted(self) -> tuple[int, ...]:
        """Return the axes that are summed over."""
        if self.leading:
            return tuple(range(self.boundary))
        return tuple(range(self.boundary, len(self.shape)))

    @property
    def kept(self) -> tuple[int, ...]:
        """Return the axes that the result has."""
        return tuple(i for i in range(len(self.shape)) if i not in self.contracted)

    @property
    def kept_shape(self) -> tuple[int, ...]:
        """Return the sizes of the kept axes."""
        return tuple(self.shape[i] for i in self.kept)

    @property
    def k(self) -> int:
        """Return how many numbers are summed up."""
        return math.prod(self.shape[i] for i in self.contracted)

    def matrix(self, x: jax.Array) -> jax.Array:
        """Return the matrix [kept, contracted]."""
        kept = math.prod(self.kept_shape)
        return x.reshape(self.k, kept).T if self.leading else x.reshape(kept, self.k)

    def scale_shape(self, mode: ScalingMode) -> tuple[int, ...]:
        """Return the shape of its scales."""
        if mode is ScalingMode.NO_SCALING:
            return (0,)
        return scale_shape(self.shape, mode, self.boundary, by_column=self.leading)


def side(op: str, name: str, x: Any, contracting: Sequence[int] | int) -> Side:
    """Describe a factor.

    Raises:
        ValueError: contracted axes that aren't the first ones, or the last ones, or that are all.
    """
    given = (contracting,) if isinstance(contracting, int) else tuple(contracting)
    axes = sorted(positive_axis(axis, x.ndim) for axis in given)
    count = len(axes)
    for leading, first in ((False, x.ndim - count), (True, 0)):
        if 0 < count < x.ndim and axes == list(range(first, first + count)):
            return Side(x.shape, count if leading else first, leading)
    raise ValueError(
        f"{op}: contracting_dims of {name} must be its first or its last axes, and not all, got "
        f"{given} for shape {x.shape}"
    )


def check_side(op: str, name: str, x: Any, scales: Any, found: Side, mode: ScalingMode) -> None:
    """Raise where dtype, blocks or scales aren't what the mode needs."""
    if mode is ScalingMode.NO_SCALING:
        checks.dtype(op, name, x.dtype, checks.FLOATS)
        return
    arguments.code_dtype(op, name, x.dtype, mode)
    if mode.is_mx:
        arguments.blocks(op, name, x.shape, found.boundary - 1 if found.leading else x.ndim - 1)
    arguments.scales(op, f"{name}_scale_inv", scales, mode, found.scale_shape(mode))


def check_pair(op: str, lhs: Any, rhs: Any, left: Side, right: Side, mode: ScalingMode) -> None:
    """Raise where two factors don't go together."""
    same = mode is ScalingMode.NO_SCALING or jnp.int8 in (lhs.dtype, rhs.dtype)
    if same and lhs.dtype != rhs.dtype:
        raise TypeError(
            f"{op}: lhs and rhs must have one dtype, got {lhs.dtype.name} and {rhs.dtype.name}"
        )
    if lhs.dtype == rhs.dtype == jnp.float8_e5m2:
        raise TypeError(
            f"{op}: lhs or rhs must be float8_e4m3fn, got float8_e5m2 twice, which Transformer "
            "Engine refuses"
        )
    if left.k != right.k:
        raise ValueError(
            f"{op}: rhs must have {left.k} contracted, as lhs of shape {lhs.shape}, got "
            f"{right.k} in shape {rhs.shape}"
        )
