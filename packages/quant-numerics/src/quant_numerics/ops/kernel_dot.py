"""Sums over rows, as gradients of weights have them: in a kernel where one pays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from interception_core import explicit_mesh, get_op, select_kernel
from interception_core.log import logger
from quant_numerics.autodiff.straight_through import straight_through
from quant_numerics.ops.cpu_dot import may_be_cut
from quant_numerics.ops.dot_sides import Side

_log = logger("quant-numerics")

_OP = "dot_int8"
_LEAST_PRODUCTS = 1 << 17
"""Products from which the kernel was measured to be faster."""
_LEAST_COLUMNS = 8
"""Columns of each side from which it was."""
_LEAST_LENGTH = 16
"""Products of a sum from which it was: it sums 64 at a time."""


def dot_in_kernel(
    lhs: Side, rhs: Side, plain: Callable[[Side, Side], jax.Array]
) -> jax.Array | None:
    """Return the rescaled contraction of two sides, or None without a kernel.

    The op ``dot_int8`` runs where it is installed, for programs that are lowered for CPU and for
    int8 that lies as batch, contracted and free axes, on both sides: XLA transposes the lhs, writes
    sums of int32 and reads them again to rescale them.

    Args:
      lhs: quantized values and their scales.
      rhs: the same.
      plain: contracts and rescales without a kernel, with the same bits.
    """
    sides = (lhs, rhs)
    if any(
        side.values.dtype != jnp.int8
        or side.scale is None
        or side.scale.dtype != jnp.float32
        or side.zero_point is not None
        or side.tiles
        or not _lies_by_row(side)
        for side in sides
    ):
        return None
    shapes = [side.values.shape for side in sides]
    reason = _refused(lhs, rhs)
    if reason is not None:
        _log.debug("int8%s by int8%s is summed in XLA: %s", *map(list, shapes), reason)
        return None

    def of(left: jax.Array, right: jax.Array, left_scale: Any, right_scale: Any) -> list[Side]:
        values, scales = (left, right), (left_scale, right_scale)
        return [
            dataclasses.replace(side, values=x, scale=scale)
            for side, x, scale in zip(sides, values, scales, strict=True)
        ]

    def in_kernel(*operands: Any) -> jax.Array:
        given = of(*operands)
        found = get_op(_OP)(*map(_matrices, given), *map(_scales, given))
        return found.reshape(
            *_sizes(lhs, lhs.batch), *_sizes(lhs, lhs.free), *_sizes(rhs, rhs.free)
        )

    def in_xla(*operands: Any) -> jax.Array:
        return plain(*of(*operands))

    def either(*operands: Any) -> jax.Array:
        return lax.platform_dependent(*operands, cpu=in_kernel, default=in_xla)

    # Kernels have no derivatives, and scales have some.
    operands = (lhs.values, rhs.values, lhs.scale, rhs.scale)
    return straight_through(either, in_xla)(*operands)


def _lies_by_row(side: Side) -> bool:
    """Return whether batch, contracted and free axes follow each other in memory, all there."""
    order = [a for a in (*side.batch, *side.contract, *side.free) if side.values.shape[a] != 1]
    return order == sorted(order) and bool(side.contract) and bool(side.free)


def _refused(lhs: Side, rhs: Side) -> str | None:
    """Return why no kernel takes two sides, or None."""
    if not all(isinstance(n, int) for n in lhs.values.shape + rhs.values.shape):
        return "a size is symbolic"
    left, right = map(_shape, (lhs, rhs))
    batch, length, rows = left
    columns = right[-1]
    if length * rows * columns < _LEAST_PRODUCTS:
        return f"kernels are for {_LEAST_PRODUCTS} products or more"
    if length < _LEAST_LENGTH or min(rows, columns) < _LEAST_COLUMNS:
        return f"kernels are for {_LEAST_LENGTH} rows and {_LEAST_COLUMNS} columns or more"
    if explicit_mesh(lhs.values, rhs.values) is not None or may_be_cut():
        return "XLA may cut it over devices, and would gather it for a kernel"
    int8, float32 = jnp.int8, jnp.float32
    operands = [
        *(jax.ShapeDtypeStruct(shape, int8) for shape in (left, right)),
        *(jax.ShapeDtypeStruct((batch, n), float32) for n in (rows, columns)),
    ]
    choice = select_kernel(_OP, "cpu", operands)
    return choice.reason if choice.spec is None else None


def _sizes(side: Side, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(side.values.shape[a] for a in axes)


def _shape(side: Side) -> tuple[int, int, int]:
    """Return the sizes of a side as batch, rows and columns."""
    batch, rows, columns = (
        math.prod(_sizes(side, axes)) for axes in (side.batch, side.contract, side.free)
    )
    return batch, rows, columns


def _matrices(side: Side) -> jax.Array:
    return side.values.reshape(_shape(side))


def _scales(side: Side) -> jax.Array:
    """Return one scale for each column of each matrix."""
    batch, _, columns = _shape(side)
    assert side.scale is not None
    scale = side.scale.reshape(side.scale_shape)
    full = _sizes(side, side.batch) + _sizes(side, side.free)
    return jnp.broadcast_to(scale, full).reshape(batch, columns)
