"""grouped_gemm_v2: groups of rows, each times its own matrix, and its gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..groups import as_matrices, owner, per_row, sums_by_group
from ..matmul.sides import Side
from ..op import Op
from ..quantize import numbers
from ..quantize.cotangents import cotangent_of
from ..quantize.modes import ScalingMode
from . import reference
from .config import GroupedConfig, Ragged, grouped_config
from .sharding import partition_grouped


def grouped_gemm_v2(
    lhs: jax.Array,
    lhs_scale_inv: jax.Array,
    rhs: jax.Array,
    rhs_scale_inv: jax.Array,
    bias: jax.Array,
    group_sizes: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    out_dtype: DTypeLike,
    contracting_dims: tuple[Sequence[int], Sequence[int]],
    scaling_mode: Any,
    ragged_axis: int = 0,
) -> jax.Array:
    """Multiply groups of rows, each with its own matrix.

    As Transformer Engine's grouped GEMM, whose six arrays of sizes are `group_sizes` and
    `ragged_axis` here. One axis of lhs is divided into groups, which follow each other:

    - one that is kept, as in a forward pass: the rows of group g become
      ``alpha[g] * rows @ rhs[g] + bias[g]``;
    - the one that is contracted, as in the gradient of weights: rhs has the same groups, and
      ``out[g] = alpha[g] * rows_of_lhs.T @ rows_of_rhs``.

    A group may be empty. What no group has, after the last one, isn't read, and is zero in the
    result. Sums are in float32 (of float8 on GPUs, in what their tensor cores have), and the result
    is rounded once. Sums of int8 are exact.

    Args:
        lhs: float32, bfloat16 or float16 without scaling; quantized values otherwise. If the axis
            that is divided is the last one, memory holds the matrices [other axes, size] of the
            groups one after the other, as ``grouped_quantize`` gives them by column.
        lhs_scale_inv: its scales, which quantized values are multiplied with; empty without
            scaling. Per tensor float32[groups]. Per channel float32 for each row of lhs, or, if the
            contracted axis is divided, for each group and row of its result. With MXFP8 as in
            ``gemm_v2``, for the whole array. Any shape of that size.
        rhs: as lhs: [groups, ...] where a kept axis of lhs is divided, or with an axis that is
            divided as that of lhs is.
        rhs_scale_inv: as `lhs_scale_inv`; per channel for each group and column.
        bias: of `out_dtype`, [groups, kept axes of rhs]; empty for none.
        group_sizes: int32[groups], on the device; the sum is at most the size of what is divided.
        alpha: float32[groups].
        beta: float32[groups], zero: the result has no value before.
        out_dtype: float32, bfloat16 or float16.
        contracting_dims: axes of lhs and of rhs that are summed over: of a group's matrix the first
            ones or the last ones.
        scaling_mode: a ``ScalingMode`` or its number, for both factors.
        ragged_axis: the axis of lhs that is divided.

    Returns:
        The kept axes of lhs and of rhs, with the groups before them if the contracted axis is
        divided.

    Differentiable with respect to floats, float8 values, float32 scales, bias and alpha; the
    matmuls of the gradient are grouped, and in floats. Int8 values and MXFP8 scales count as
    constant.

    Raises:
        TypeError: a dtype that the mode doesn't have, or two that don't go together.
        ValueError: shapes that don't go together.
        NotImplementedError: NVFP4.
        jax.errors.JaxRuntimeError: when it runs: sizes that are negative, have a larger sum, or cut
            MX blocks, or a `beta` that isn't 0. (The reference can't tell; on CUDA the result is
            NaN for such a `beta`; devices that share groups out see only their sizes.)
    """
    operands = (lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, group_sizes, alpha, beta)
    config = grouped_config(
        "grouped_gemm_v2", operands, out_dtype, contracting_dims, scaling_mode, ragged_axis
    )
    scales = (lhs_scale_inv, rhs_scale_inv)
    left, right = (x.reshape(s) for x, s in zip(scales, config.scale_shapes, strict=True))
    return GROUPED(config, lhs, left, rhs, right, bias, group_sizes, alpha, beta)


def grouped_dense(
    x: jax.Array,
    kernel: jax.Array,
    group_sizes: jax.Array,
    contracting_dims: tuple[Sequence[int], Sequence[int]] = ((1,), (1,)),
    bias: jax.Array | None = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """Multiply groups of rows of floats, each with its own kernel.

    As Transformer Engine's function, without quantizers: ``grouped_quantize`` and
    ``grouped_gemm_v2`` together do what those do.

    Args:
        x: float32, bfloat16 or float16 [rows, features]: the rows of the groups, one group after
            the other.
        kernel: of x's dtype, [groups, features, out features].
        group_sizes: int32[groups]: how many rows each group has.
        contracting_dims: axes of x and of kernel that are summed over.
        bias: of the result's dtype, [groups, out features]; None for none.
        preferred_element_type: the result's dtype; None for x's.

    Returns:
        [rows, out features]; rows of no group are zero.

    Raises:
        TypeError, ValueError, jax.errors.JaxRuntimeError: as ``grouped_gemm_v2``.
    """
    dtype = x.dtype if preferred_element_type is None else preferred_element_type
    nothing, ones = jnp.zeros((0,), jnp.float32), jnp.ones(group_sizes.shape, jnp.float32)
    bias = jnp.zeros((0,), dtype) if bias is None else bias
    given = (x, nothing, kernel, nothing, bias, group_sizes, ones, 0 * ones)
    return grouped_gemm_v2(*given, dtype, contracting_dims, ScalingMode.NO_SCALING)


def _gradient(config: GroupedConfig, saved: Any, ct: jax.Array) -> Any:
    """Return cotangents, by two matmuls, one of which divides the other axis."""
    lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, sizes, alpha, _ = saved
    groups, length = config.groups, config.length
    owners = owner(sizes, length)
    floats = config.mode is ScalingMode.NO_SCALING
    dtype = jnp.promote_types(config.out_dtype, lhs.dtype) if floats else config.out_dtype
    # [length, across] of what is divided, [groups, k, n] of what isn't.
    left = _numbers(config, config.left, lhs, lhs_scale_inv, owners, sizes).astype(dtype)
    right = _numbers(config, config.right, rhs, rhs_scale_inv, owners, sizes).astype(dtype)
    each = alpha[:, None, None]
    if config.rows:
        ct = ct.reshape(length, right.shape[2]).astype(dtype)
        left_grad = _matmul(Ragged.ROWS, ct, right, sizes, alpha, turned=True)
        plain = _matmul(Ragged.CONTRACTED, left, ct, sizes, jnp.ones_like(alpha))
        alpha_ct = (plain * right.astype(jnp.float32)).sum((1, 2))
        right_grad = plain * each
    else:
        ct = ct.reshape(groups, left.shape[1], right.shape[1]).astype(dtype)
        plain = _matmul(Ragged.ROWS, right, ct, sizes, jnp.ones_like(alpha), turned=True)
        alpha_ct = sums_by_group((plain * left.astype(jnp.float32)).sum(1), owners, groups)
        left_grad = plain * per_row(alpha, owners)[:, None]
        right_grad = _matmul(Ragged.ROWS, left, ct, sizes, alpha)
    bias_ct = None
    if config.has_bias:
        bias_ct = sums_by_group(ct.astype(jnp.float32), owners, groups).reshape(bias.shape)
    return (
        *_of_factor(config, config.left, lhs, lhs_scale_inv, left_grad, owners, sizes),
        *_of_factor(config, config.right, rhs, rhs_scale_inv, right_grad, owners, sizes),
        cotangent_of(bias, bias_ct),
        None,
        alpha_ct,
        None,
    )


def _matmul(
    ragged: Ragged,
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    alpha: jax.Array,
    *,
    turned: bool = False,
) -> jax.Array:
    """Multiply floats in float32, with lhs divided along its first axis.

    Args:
        ragged: what that axis is in the matmul.
        lhs: [length, across].
        rhs: [groups, k, n], or [length, n] if the contracted axis is divided.
        sizes: int32[groups], the sizes of the groups.
        alpha: float32[groups].
        turned: whether rhs is [groups, n, k].
    """
    rows = ragged is Ragged.ROWS
    left = Side(lhs.shape, 1, not rows)
    right = Side(rhs.shape[rows:], 1, not turned)
    mode, wide = ScalingMode.NO_SCALING, jnp.dtype(jnp.float32)
    config = GroupedConfig(wide, mode, ragged, sizes.shape[0], left, right)
    nothing = jnp.zeros((0,), jnp.float32)
    return GROUPED(config, lhs, nothing, rhs, nothing, nothing, sizes, alpha, 0 * alpha)


def _is_divided(config: GroupedConfig, side: Side) -> bool:
    return side is config.left or not config.rows


def _numbers(
    config: GroupedConfig,
    side: Side,
    x: jax.Array,
    scales: jax.Array,
    owners: jax.Array,
    sizes: jax.Array,
) -> jax.Array:
    """Return what a factor stands for: [length, across], or [groups, k, n]."""
    found = _arranged(config, side, reference.decoded(config, side, x, scales), owners, sizes)
    wide = _spread(config, side, scales, owners)
    return found.astype(jnp.float32) * wide if wide is not None else found


def _arranged(
    config: GroupedConfig, side: Side, x: jax.Array, owners: jax.Array, sizes: jax.Array
) -> jax.Array:
    if _is_divided(config, side):
        return reference.divided(config, side, x, owners, sizes)
    return reference.matrices(config, x)


def _back(config: GroupedConfig, side: Side, x: jax.Array, sizes: jax.Array) -> jax.Array:
    """Return what ``_arranged`` was given, in its shape."""
    if not _is_divided(config, side):
        turned = x if side.leading else x.swapaxes(1, 2)
        return turned.reshape(config.rhs_shape)
    return (x if config.first(side) else as_matrices(x, sizes)).reshape(side.shape)


def _spread(
    config: GroupedConfig, side: Side, scales: jax.Array, owners: jax.Array
) -> jax.Array | None:
    """Return scales that broadcast against ``_arranged``, or None.

    None without scaling, and for MX, whose scales are multiplied in before.
    """
    mode = config.mode
    if mode is ScalingMode.NO_SCALING or mode.is_mx:
        return None
    divided = _is_divided(config, side)
    if mode.is_tensor:
        return per_row(scales.reshape(-1), owners)[:, None] if divided else scales.reshape(-1, 1, 1)
    if not divided:
        return scales.reshape(config.groups, 1, -1)
    if config.rows:
        return scales.reshape(-1, 1)
    return per_row(scales.reshape(config.groups, -1), owners)


def _of_factor(
    config: GroupedConfig,
    side: Side,
    x: jax.Array,
    scales: jax.Array,
    grad: jax.Array,
    owners: jax.Array,
    sizes: jax.Array,
) -> tuple[Any, Any]:
    """Return a factor's and its scales' cotangents from its numbers' cotangent."""
    mode = config.mode
    if mode is ScalingMode.NO_SCALING:
        return cotangent_of(x, _back(config, side, grad, sizes)), None
    if mode.is_mx:
        by_group = not _is_divided(config, side)
        shape, axis = (config.rhs_shape, 1) if by_group else (side.shape, 0)
        wide = numbers.spread(
            scales.reshape(config.scale_shapes[side is config.right]), shape, mode,
            axis + side.boundary, by_column=side.leading,
        )  # fmt: skip
        back = _back(config, side, grad, sizes).reshape(shape)
        return cotangent_of(x, numbers.multiply_by_power(back, wide)), None
    wide = _spread(config, side, scales, owners)
    assert wide is not None
    terms = grad * _arranged(config, side, x, owners, sizes).astype(jnp.float32)
    scales_ct = _reduced(config, side, terms, owners).reshape(scales.shape)
    return (
        cotangent_of(x, _back(config, side, grad * wide, sizes)),
        cotangent_of(scales, scales_ct),
    )


def _reduced(config: GroupedConfig, side: Side, terms: jax.Array, owners: jax.Array) -> jax.Array:
    """Return sums over what shares a scale."""
    if not _is_divided(config, side):
        return terms.sum((1, 2) if config.mode.is_tensor else 1)
    if config.mode.is_tensor:
        return sums_by_group(terms.sum(1), owners, config.groups)
    return terms.sum(1) if config.rows else sums_by_group(terms, owners, config.groups)


def _batch(
    run: Any, config: GroupedConfig, size: int, in_batched: Sequence[bool], *operands: jax.Array
) -> Any:
    """Give each group the rows of all mapped lhs.

    NotImplemented, which runs the op index by index, if other operands are mapped, too.
    """
    # Scales of rows or of their blocks are mapped with the rows.
    along = config.mode is ScalingMode.CHANNEL_SCALING or config.mode.is_mx
    alone = tuple(in_batched) == (True, along, *(False,) * 6)
    if not (alone and config.rows and config.first(config.left)):
        return NotImplemented

    def merged(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        moved = jnp.moveaxis(x.reshape(size, *shape), 0, 1)
        return moved.reshape(shape[0] * size, *shape[1:])

    lhs, scales, *rest = operands
    rest[3] = rest[3] * size
    wide = merged(lhs, config.left.shape)
    if along:
        scales = merged(scales, config.scale_shapes[0])
    left = dataclasses.replace(config.left, shape=wide.shape)
    found = run(dataclasses.replace(config, left=left), wide, scales, *rest)
    apart = found.reshape(config.length, size, *config.shape[1:])
    return jnp.moveaxis(apart, 1, 0), True


GROUPED = Op(
    "grouped_gemm_v2",
    reference.grouped,
    results=lambda config, *_: config.result,
    attributes=lambda config, *_: config.attributes(),
    partition=partition_grouped,
    batch=_batch,
    gradient=_gradient,
)
