"""Integer contractions on CPU: the layouts in which XLA's are slow.

Measured with jaxlib 0.10 to 0.12: int8 is fast where the lhs ends with what is contracted.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
