"""The static arguments of grouped_gemm_v2, checked."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import checks
from ..matmul.sides import Side, check_pair, side
from ..quantize import arguments
from ..quantize.modes import ScalingMode, positive_axis, scale_shape


class Ragged(enum.IntEnum):
    """Which axis of lhs is divided into groups."""

    ROWS = 0
    """A kept one: a group has some rows of the result, and a matrix of rhs."""
    CONTRACTED = 1
    """The contracted one, of both factors: each group has a result."""


@dataclasses.dataclass(frozen=True)
class GroupedConfig:
    """The static arguments of grouped_gemm_v2.

    Attributes:
        out_dtype: dtype of the result.
        mode: scaling mode of both factors.
        ragged: which axis of lhs is divided.
        groups: how many groups there are.
        left: the layout of lhs.
        right: the layout of rhs; of one group if rows are divided.
        has_bias: whether there is a bias.
    """

    out_dtype: Any
    mode: ScalingMode
    ragged: Ragged
    groups: int
    left: Side
    right: Side
    has_bias: bool = False

    @property
    def rows(self) -> bool:
        """Return whether rows are divided."""
        return self.ragged is Ragged.ROWS

    @property
    def length(self) -> int:
        """Return the size of the axis that is divided."""
        return self.left.kept_shape[0] if self.rows else self.left.k

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result."""
        kept = (*self.left.kept_shape, *self.right.kept_shape)
        return kept if self.rows else (self.groups, *kept)

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        """Return the type of the result."""
        return jax.ShapeDtypeStruct(self.shape, self.out_dtype)

    @property
    def rhs_shape(self) -> tuple[int, ...]:
        """Return the shape of rhs."""
        return (self.groups, *self.right.shape) if self.rows else self.right.shape

    @property
    def scale_shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the shapes of the scales of lhs and of rhs."""
        if self.mode is ScalingMode.NO_SCALING:
            return (0,), (0,)
        if self.mode.is_tensor:
            return (self.groups,), (self.groups,)
        by_group = (self.groups,)
        left, right = (
            scale_shape(one.shape, self.mode, one.boundary, by_column=one.leading)
            for one in (self.left, self.right)
        )
        if self.mode.is_mx:
            return left, by_group + right if self.rows else right
        return left if self.rows else by_group + left, by_group + right

    def first(self, side: Side) -> bool:
        """Return whether a factor's divided axis is its first, not its last."""
        return side.leading != self.rows

    def block(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> GroupedConfig:
        """Return the config for blocks of the factors, of these shapes."""
        return dataclasses.replace(
            self,
            groups=rhs[0] if self.rows else self.groups,
            left=dataclasses.replace(self.left, shape=lhs),
            right=dataclasses.replace(self.right, shape=rhs[1:] if self.rows else rhs),
        )

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the FFI call."""
        return {
            "scaling_mode": int(self.mode),
            "lhs_axis_boundary": self.left.boundary,
            "rhs_axis_boundary": self.right.boundary + self.rows,
            "lhs_is_trans": self.left.leading,
            "rhs_is_trans": not self.right.leading,
            "ragged": int(self.ragged),
        }


def grouped_config(
    op: str,
    operands: Sequence[jax.Array],
    out_dtype: DTypeLike,
    contracting_dims: tuple[Sequence[int], Sequence[int]],
    scaling_mode: Any,
    ragged_axis: int,
) -> GroupedConfig:
    """Check the arguments of grouped_gemm_v2 against each other.

    Args:
        op: name of the op, for errors.
        operands: the arrays, in the order of ``grouped_gemm_v2``.
        out_dtype: as there.
        contracting_dims: as there.
        scaling_mode: as there.
        ragged_axis: as there.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``te_ffi_kernels.grouped_gemm_v2``.
    """
    lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, group_sizes, alpha, beta = operands
    mode = arguments.scaling_mode(op, scaling_mode, quantized=False)
    checks.dtype(op, "group_sizes", group_sizes.dtype, (jnp.int32,))
    if group_sizes.ndim != 1 or group_sizes.size == 0:
        raise ValueError(
            f"{op}: group_sizes must have one axis, with a size for each group, got shape "
            f"{group_sizes.shape}"
        )
    groups = group_sizes.size
    left = side(op, "lhs", lhs, contracting_dims[0])
    at = positive_axis(ragged_axis, lhs.ndim)
    rows = at not in left.contracted
    ragged = Ragged.ROWS if rows else Ragged.CONTRACTED
    right = _of_group(op, rhs, contracting_dims[1], groups) if rows else None
    if right is None:
        right = side(op, "rhs", rhs, contracting_dims[1])
    config = GroupedConfig(
        checks.dtype(op, "out_dtype", out_dtype, checks.FLOATS),
        mode, ragged, groups, left, right, has_bias=bias.size > 0,
    )  # fmt: skip
    _check_ragged(op, "lhs", left, left.kept if rows else left.contracted, at)
    if not rows:
        _check_ragged(op, "rhs", right, right.contracted, None)
    for name, x, one in (("lhs", lhs, left), ("rhs", rhs, right)):
        _check_dtype(op, name, x, one, config)
    check_pair(op, lhs, rhs, left, right, mode)
    for name, scales, shape in zip(
        ("lhs_scale_inv", "rhs_scale_inv"), (lhs_scale_inv, rhs_scale_inv), config.scale_shapes,
        strict=True,
    ):  # fmt: skip
        if mode is ScalingMode.NO_SCALING:
            checks.shape(op, name, scales, (0,), "NO_SCALING has none")
        else:
            arguments.scales_dtype(op, name, scales.dtype, mode)
            if scales.size != arguments.size(shape):
                raise ValueError(
                    f"{op}: {name} must have shape {shape}, as {mode.name} has it, or as many in "
                    f"one axis, got {scales.shape}"
                )
    if config.has_bias:
        if not rows:
            raise ValueError(
                f"{op}: bias must be empty where the contracted axis is divided, got shape "
                f"{bias.shape}. Add it to the result."
            )
        kept = (groups, *right.kept_shape)
        checks.shape(op, "bias", bias, kept, "one for each group and column, or (0,)")
        checks.dtype(op, "bias", bias.dtype, (config.out_dtype,))
    for name, numbers in (("alpha", alpha), ("beta", beta)):
        checks.dtype(op, name, numbers.dtype, (jnp.float32,))
        checks.shape(op, name, numbers, (groups,), "one for each group")
    return config


def _of_group(op: str, rhs: jax.Array, contracting: Sequence[int] | int, groups: int) -> Side:
    """Describe the matrix that each group has of rhs."""
    given = (contracting,) if isinstance(contracting, int) else tuple(contracting)
    axes = [positive_axis(axis, rhs.ndim) for axis in given]
    if rhs.ndim < 3 or rhs.shape[0] != groups or 0 in axes:
        raise ValueError(
            f"{op}: rhs must have three axes: first {groups}, one for each of group_sizes, "
            f"which isn't contracted, got shape {rhs.shape} with {given} "
            "contracted"
        )
    of_group = jax.ShapeDtypeStruct(rhs.shape[1:], rhs.dtype)
    return side(op, "rhs", of_group, [axis - 1 for axis in axes])


def _check_ragged(op: str, name: str, one: Side, axes: tuple[int, ...], at: int | None) -> None:
    """Raise unless one axis is divided, the first or the last."""
    if len(axes) == 1 and at in (None, axes[0]):
        return
    raise ValueError(
        f"{op}: {name} must be divided along one axis beside those that are "
        f"{'contracted' if axes == one.kept else 'kept'}, got {axes} in shape {one.shape}"
    )


def _check_dtype(op: str, name: str, x: jax.Array, one: Side, config: GroupedConfig) -> None:
    """Raise where a factor isn't what the mode needs."""
    if config.mode is ScalingMode.NO_SCALING:
        checks.dtype(op, name, x.dtype, checks.FLOATS)
        return
    arguments.code_dtype(op, name, x.dtype, config.mode)
    if not config.mode.is_mx:
        return
    arguments.blocks(op, name, one.shape, one.boundary - 1 if one.leading else len(one.shape) - 1)
    divided = name == "lhs" or not config.rows
    if divided and not config.first(one):
        raise ValueError(
            f"{op}: {name} must be divided along its first axis with MX blocks, got shape "
            f"{x.shape}. grouped_quantize doesn't transpose them."
        )
