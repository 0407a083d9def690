"""Contractions of two operands in one block format, where a platform multiplies them as they are.

GPUs from Blackwell on take blocks with their scales into the matrix units: XLA's
``block_scaled_dot``, which is ``jax.nn.scaled_matmul``. Older ones dequantize for one matmul, which
is still faster than sums of each block, since these are larger than the operands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quant_numerics._compat import primitive
from quant_numerics.array.qarray import QArray, qtype_of

FORMATS = ("mxfp8", "nvfp4")
"""Those that both operands may have: cuDNN has matmuls of them."""
_PLATFORMS = ("cuda", "rocm")


def block_dot(
    plain: Callable[[QArray, QArray], jax.Array],
    lhs: QArray,
    rhs: QArray,
    dimension_numbers: Any,
) -> jax.Array:
    """Contract to float32 (batch, lhs free, rhs free) like `plain`, which other platforms run."""
    leaves, tree = jax.tree.flatten((lhs, rhs))

    def other(*leaves: jax.Array) -> jax.Array:
        return plain(*jax.tree.unflatten(tree, leaves))

    def native(*leaves: jax.Array) -> jax.Array:
        left, right = jax.tree.unflatten(tree, leaves)
        return _native(left, right, dimension_numbers)

    @jax.custom_jvp
    def run(*leaves: jax.Array) -> jax.Array:
        return lax.platform_dependent(*leaves, default=other, **dict.fromkeys(_PLATFORMS, native))

    def tangent(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[jax.Array, jax.Array]:
        is_zero = [isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents]

        def of_active(*active: Any) -> jax.Array:
            left = iter(active)
            return other(
                *(x if zero else next(left) for x, zero in zip(primals, is_zero, strict=True))
            )

        active = [x for x, zero in zip(primals, is_zero, strict=True) if not zero]
        dots = [t for t, zero in zip(tangents, is_zero, strict=True) if not zero]
        return run(*primals), jax.jvp(of_active, active, dots)[1]

    run.defjvp(tangent, symbolic_zeros=True)
    return run(*leaves)


def is_block_dot(lhs: Any, rhs: Any, dimension_numbers: Any) -> bool:
    """Return whether both operands have one format and blocks along the whole contraction."""
    if not (isinstance(lhs, QArray) and isinstance(rhs, QArray)):
        return False
    (lc, rc), _ = dimension_numbers
    sizes = (*lhs.shape, *rhs.shape)
    return (
        lhs.qtype == rhs.qtype
        and lhs.qtype in FORMATS
        and all(isinstance(size, int) and size > 0 for size in sizes)
        and _has_blocks(lhs, lc)
        and _has_blocks(rhs, rc)
        # The program of one device has no partitions for custom calls.
        and not jax.sharding.get_abstract_mesh().manual_axes
    )


def _has_blocks(q: QArray, contract: Sequence[int]) -> bool:
    """Return whether scales are those of consecutive blocks of the contracted axes, in order."""
    block = qtype_of(q).block or 1
    shape, scales = (tuple(x.shape[a] for a in contract) for x in (q, q.scale))
    if q.ragged_tiles or not contract or math.prod(shape) != block * math.prod(scales):
        return False
    if any(q.scale.shape[a] not in (1, n) for a, n in enumerate(q.shape) if a not in contract):
        return False
    if q.global_scale is not None and any(q.global_scale.shape[a] != 1 for a in contract):
        return False
    # Axes with a scale per index, one that is cut, and axes that lie within a block.
    within = False
    for size, count in zip(shape, scales, strict=True):
        if within and count != 1:
            return False
        within = within or count != size
    return True


def _native(lhs: QArray, rhs: QArray, dimension_numbers: Any) -> jax.Array:
    contract, batch = dimension_numbers
    shape = [lhs.shape[a] for a in batch[0]]
    sides, factors = [], []
    for q, summed, mapped in zip((lhs, rhs), contract, batch, strict=True):
        free = [a for a in range(q.ndim) if a not in (*summed, *mapped)]
        shape += [q.shape[a] for a in free]
        order = (*mapped, *free, *summed)
        sizes = [math.prod(q.shape[a] for a in axes) for axes in (mapped, free)]
        kept = [n if a not in summed else s for a, (n, s) in
                enumerate(zip(q.shape, q.scale.shape, strict=True))]  # fmt: skip
        scale = jnp.broadcast_to(q.scale, kept)
        sides.append([lax.transpose(x, order).reshape(*sizes, -1) for x in (q.qvalue, scale)])
        if q.global_scale is not None:
            # Rows that were looked up, or mapped, have one each.
            kept = [1 if a in summed else n for a, n in enumerate(q.shape)]
            wide = lax.transpose(jnp.broadcast_to(q.global_scale, kept), order).reshape(sizes)
            factors.append(jnp.expand_dims(wide, 2 if q is lhs else 1))
    (left, left_scale), (right, right_scale) = sides
    out = scaled_matmul_p.bind(left, right, left_scale, right_scale)
    return math.prod(factors, start=out).reshape(shape)


def _result(lhs: Any, rhs: Any, lhs_scale: Any, rhs_scale: Any) -> Any:
    return jax.core.ShapedArray((*lhs.shape[:2], rhs.shape[1]), jnp.dtype(jnp.float32))


def _dequantized(
    lhs: jax.Array, rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array
) -> jax.Array:
    """Multiply in float32, which holds the numbers of both sides exactly."""

    def floats(x: jax.Array, scale: jax.Array) -> jax.Array:
        blocks = x.astype(np.float32).reshape(*scale.shape, -1)
        return (blocks * scale.astype(np.float32)[..., None]).reshape(x.shape)

    dims = (((2,), (2,)), ((0,), (0,)))
    return lax.dot_general(floats(lhs, lhs_scale), floats(rhs, rhs_scale), dims)


def _batched(operands: Sequence[jax.Array], dims: Sequence[Any]) -> tuple[jax.Array, int]:
    size = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
    mapped = [dims[i] is not None or dims[i + 2] is not None for i in (0, 1)]
    # With one side fixed, examples are more rows of the other. Otherwise they are a batch.
    axis = 0 if all(mapped) else 1

    def merged(x: jax.Array, dim: Any, is_mapped: bool) -> jax.Array:
        if not is_mapped:
            return x
        if dim is None:
            x, dim = jnp.broadcast_to(x, (size, *x.shape)), 0
        x = jnp.moveaxis(x, dim, axis)
        return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])

    out = scaled_matmul_p.bind(*map(merged, operands, dims, mapped * 2))
    axis = axis if mapped[0] else 2
    return out.reshape(*out.shape[:axis], size, -1, *out.shape[axis + 1 :]), axis


# A primitive of our own: JAX's can't be exported, be lowered for several platforms, or be mapped
# with one operand fixed (before 0.11).
scaled_matmul_p = primitive(
    "quant_numerics.scaled_matmul",
    _result,
    _dequantized,
    jax.nn.scaled_matmul,
    _PLATFORMS,
    _batched,
)
