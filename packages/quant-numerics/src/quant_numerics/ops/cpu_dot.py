"""Integer contractions on CPU: the layouts in which XLA's are slow, and a kernel where one pays.

Measured with jaxlib 0.10 to 0.12: int8 is fast where the lhs ends with what is contracted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from interception_core import explicit_mesh, get_op, select_kernel
from interception_core.log import logger
from quant_numerics.autodiff.linear import on_platforms
from quant_numerics.ops.arithmetic import Side

GEMV_ROWS = 4
"""Rows that a single row is padded to on CPU."""
_LEAST_SIZE = 1 << 20
"""Elements of the matrix from which padding wins."""
_LEAST_FREE = 256
"""Sums from which it was measured to win."""

_BLOCK = 64
"""Rows that are transposed at once: as many bytes as a line of the cache has."""
_LEAST_PRODUCTS = 1 << 19
"""Products from which transposing wins. With AVX2 it is 1.1 to 2.6 times as fast there, and 2 to 4
times with four times as many; with more instructions for int8 it gains more."""
_LEAST_COLUMNS = 8
"""Columns of the rhs from which it was measured to win: so many products has each element."""
_LEAST_LENGTH = 8
"""Products of a sum from which it was."""


def int_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    out_sharding: Any = None,
) -> jax.Array:
    """Contract integers like ``lax.dot_general``, summed in int32.

    For programs lowered for CPU the operands of two kinds of contractions are laid out otherwise,
    with the same result:

    - One row times a matrix of at least 2**20 elements and 256 columns. XLA has a special loop for
      that, without the blocking that it gives to matrices: 1.5 to 10 times slower than padding the
      row with zeros to ``GEMV_ROWS`` rows. From 2 rows on padding loses, and so it does for a
      matrix times one column.
    - An int8 lhs whose last axis is not contracted, as in a weight's gradient. XLA's loop for it is
      3 to 40 times slower than for other layouts. A transpose is folded into the contraction
      again, unless a loop makes it.
    """

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(
            a, b, dimension_numbers, preferred_element_type=jnp.int32, out_sharding=out_sharding
        )

    (lc, rc), (lb, rb) = dimension_numbers
    if out_sharding is not None or not all(isinstance(n, int) for n in lhs.shape + rhs.shape):
        return dot(lhs, rhs)  # a symbolic size may be small
    free = [axis for axis in range(lhs.ndim) if axis not in (*lc, *lb)]
    rows, length, batch = (math.prod(lhs.shape[a] for a in axes) for axes in (free, lc, lb))
    columns = rhs.size // max(length * batch, 1)

    def padded(a: jax.Array, b: jax.Array) -> jax.Array:
        dims = ((tuple(axis + 1 for axis in lc), tuple(rc)), ((), ()))
        out = lax.dot_general(_rows(a), b, dims, preferred_element_type=jnp.int32)
        return lax.index_in_dim(out, 0, 0, keepdims=False)

    def transposed(a: jax.Array, b: jax.Array) -> jax.Array:
        n, m = len(lb), len(free)
        order = (*lb, *lc, *free)
        sizes = [a.shape[axis] for axis in order]
        matrix = lax.transpose(a, order).reshape(*sizes[:n], length, rows)
        a = _transposed(matrix).reshape(*sizes[:n], *sizes[a.ndim - m :], *sizes[n : a.ndim - m])
        dims = ((tuple(range(n + m, a.ndim)), tuple(rc)), (tuple(range(n)), tuple(rb)))
        return lax.dot_general(a, b, dims, preferred_element_type=jnp.int32)

    if rows == 1 and not lb:
        if rhs.size < _LEAST_SIZE or columns < _LEAST_FREE:
            return dot(lhs, rhs)
        return lax.platform_dependent(lhs, rhs, cpu=padded, default=dot)
    is_large = columns >= _LEAST_COLUMNS and rows * columns * length >= _LEAST_PRODUCTS
    if is_large and length >= _LEAST_LENGTH and _ends_with(lhs, free) and not may_be_cut():
        return lax.platform_dependent(lhs, rhs, cpu=transposed, default=dot)
    return dot(lhs, rhs)


def _ends_with(x: jax.Array, axes: Sequence[int]) -> bool:
    """Return whether elements that lie side by side in an int8 array differ in one of the axes."""
    long = [axis for axis, size in enumerate(x.shape) if size > 1]
    return x.dtype.itemsize == 1 and bool(long) and long[-1] in axes


def may_be_cut() -> bool:
    """Return whether XLA may have to cut a loop's array over devices of CPU: it would gather it."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.axis_names and len(mesh.manual_axes) == len(mesh.axis_names):
        return False  # the program is that of one device
    try:
        return jax.device_count("cpu") > 1
    except RuntimeError:  # JAX_PLATFORMS leaves CPU out
        return True


def _transposed(x: jax.Array) -> jax.Array:
    """Return x with its last two axes swapped, in a loop that XLA does not look through."""
    *lead, rows, columns = x.shape
    # Twice at least: XLA takes a loop of one step apart.
    size = min(_BLOCK, -(-rows // 2))

    def step(i: jax.Array, out: jax.Array) -> jax.Array:
        # The last block may overlap the one before it.
        start = jnp.minimum(i * size, rows - size)
        block = lax.dynamic_slice_in_dim(x, start, size, x.ndim - 2)
        return lax.dynamic_update_slice_in_dim(
            out, jnp.swapaxes(block, -1, -2), start, out.ndim - 1
        )

    # All elements are written; this one makes the result vary over devices as x does.
    filled = jnp.broadcast_to(x[..., :1, :1], (*lead, columns, rows))
    return lax.fori_loop(0, -(-rows // size), step, filled)


def _rows(x: jax.Array) -> jax.Array:
    """Return `x` as the first of several rows, zero otherwise."""
    rows = lax.expand_dims(x, (0,))
    return lax.pad(rows, np.zeros((), x.dtype), [(0, GEMV_ROWS - 1, 0)] + [(0, 0, 0)] * x.ndim)


_log = logger("quant-numerics")

_OP = "dot_int8"
_KERNEL_PRODUCTS = 1 << 17
"""Products from which the kernel was measured to be faster."""
_KERNEL_COLUMNS = 8
"""Columns of each side from which it was."""
_KERNEL_LENGTH = 16
"""Products of a sum from which it was: it sums 64 at a time."""


def dot_in_kernel(
    lhs: Side, rhs: Side, plain: Callable[[Side, Side], jax.Array]
) -> jax.Array | None:
    """Return the rescaled contraction of two sides, or None without a kernel.

    The op ``dot_int8`` runs where it is installed, for programs that are lowered for CPU and for
    int8 whose batch axes come first, then the contracted and the free ones, or the free and the
    contracted ones. XLA writes sums of int32 and reads them again to rescale them, and where both
    sides begin with what is contracted, as gradients of weights have it, it transposes the lhs.
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

    return on_platforms(in_xla, lhs.values, rhs.values, lhs.scale, rhs.scale, cpu=in_kernel)


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
    if length * rows * columns < _KERNEL_PRODUCTS:
        return f"kernels are for {_KERNEL_PRODUCTS} products or more"
    if length < _KERNEL_LENGTH or min(rows, columns) < _KERNEL_COLUMNS:
        return f"kernels are for {_KERNEL_LENGTH} rows and {_KERNEL_COLUMNS} columns or more"
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
