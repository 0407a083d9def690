"""Integer contractions of one row on CPU, where XLA's are slow."""

import math
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


def int_dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    out_sharding: Any = None,
) -> jax.Array:
    """Contract integers like ``lax.dot_general``, summed in int32.

    XLA's CPU backend has a special loop for one integer row times a matrix, without the blocking
    that it gives to matrices: 1.5 to 10 times slower than padding the row with zeros to
    ``GEMV_ROWS`` rows. That is done for programs lowered for CPU, where the lhs has one row and the
    rhs at least 2**20 elements and 256 columns. From 2 rows on padding loses, and so it does for a
    matrix times one column.
    """

    def dot(a: jax.Array, b: jax.Array) -> jax.Array:
        return lax.dot_general(
            a, b, dimension_numbers, preferred_element_type=jnp.int32, out_sharding=out_sharding
        )

    (lc, rc), (lb, _) = dimension_numbers
    if lb or out_sharding is not None:
        return dot(lhs, rhs)
    length = math.prod(lhs.shape[a] for a in lc)
    if lhs.size != length or rhs.size < max(_LEAST_SIZE, _LEAST_FREE * length):
        return dot(lhs, rhs)

    def padded(a: jax.Array, b: jax.Array) -> jax.Array:
        dims = ((tuple(axis + 1 for axis in lc), tuple(rc)), ((), ()))
        out = lax.dot_general(_rows(a), b, dims, preferred_element_type=jnp.int32)
        return lax.index_in_dim(out, 0, 0, keepdims=False)

    return lax.platform_dependent(lhs, rhs, cpu=padded, default=dot)


def _rows(x: jax.Array) -> jax.Array:
    """Return `x` as the first of several rows, zero otherwise."""
    rows = lax.expand_dims(x, (0,))
    return lax.pad(rows, np.zeros((), x.dtype), [(0, GEMV_ROWS - 1, 0)] + [(0, 0, 0)] * x.ndim)
