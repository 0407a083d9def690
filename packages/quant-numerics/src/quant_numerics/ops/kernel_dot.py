"""Products of int8 that a training step quantized: in a kernel where one pays."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
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
    int8 whose batch axes come first, then the contracted and the free ones, or the free and the
    contracted ones. XLA writes sums of int32 and reads them again to rescale them, and where both
    sides begin with what is contracted, as gradients of weights have it, it transposes the lhs.

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
        or _ends_with_sum(side) is None
        for side in sides
    ):
        return None
    shapes = [side.values.shape for side in sides]
    last = {"lhs_last": bool(_ends_with_sum(lhs)), "rhs_last": bool(_ends_with_sum(rhs))}
    reason = _refused(lhs, rhs, last)
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
        matrices = [
            side.values.reshape(_shape(side, ends))
            for side, ends in zip(given, last.values(), strict=True)
        ]
        found = get_op(_OP)(*matrices, *map(_scales, given), **last)
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


def _ends_with_sum(side: Side) -> bool | None:
    """Return whether the contracted axes come last; None: not as a kernel takes them.

    Batch axes come first, and each kind of axis is there and lies together.
    """
    if not (side.contract and side.free):
        return None
    for last, rest in ((False, side.contract + side.free), (True, side.free + side.contract)):
        order = [a for a in (*side.batch, *rest) if side.values.shape[a] != 1]
        if order == sorted(order):
            return last
    return None


def _refused(lhs: Side, rhs: Side, last: Mapping[str, bool]) -> str | None:
    """Return why no kernel takes two sides, or None."""
    if not all(isinstance(n, int) for n in lhs.values.shape + rhs.values.shape):
        return "a size is symbolic"
    batch, length, rows = _shape(lhs, False)
    columns = _shape(rhs, False)[-1]
    if length * rows * columns < _LEAST_PRODUCTS:
        return f"kernels are for {_LEAST_PRODUCTS} products or more"
    if length < _LEAST_LENGTH or min(rows, columns) < _LEAST_COLUMNS:
        return f"kernels are for {_LEAST_LENGTH} rows and {_LEAST_COLUMNS} columns or more"
    if explicit_mesh(lhs.values, rhs.values) is not None or may_be_cut():
        return "XLA may cut it over devices, and would gather it for a kernel"
    int8, float32 = jnp.int8, jnp.float32
    operands = [
        *(
            jax.ShapeDtypeStruct(_shape(side, ends), int8)
            for side, ends in zip((lhs, rhs), last.values(), strict=True)
        ),
        *(jax.ShapeDtypeStruct((batch, n), float32) for n in (rows, columns)),
    ]
    choice = select_kernel(_OP, "cpu", operands, **last)
    return choice.reason if choice.spec is None else None


def _sizes(side: Side, axes: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(side.values.shape[a] for a in axes)


def _shape(side: Side, last: bool) -> tuple[int, int, int]:
    """Return a side's sizes: batch, what is summed and what is left, which `last` swaps."""
    batch, length, kept = (
        math.prod(_sizes(side, axes)) for axes in (side.batch, side.contract, side.free)
    )
    return (batch, kept, length) if last else (batch, length, kept)


def _scales(side: Side) -> jax.Array:
    """Return one scale for each column of each matrix."""
    batch, _, columns = _shape(side, False)
    assert side.scale is not None
    scale = side.scale.reshape(side.scale_shape)
    full = _sizes(side, side.batch) + _sizes(side, side.free)
    return jnp.broadcast_to(scale, full).reshape(batch, columns)
