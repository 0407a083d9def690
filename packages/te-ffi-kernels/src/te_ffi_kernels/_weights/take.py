"""Rows and columns out of packed weights, as floats."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import _op
from . import reference
from .layout import Layout
from .packed import PackedWeight


def packed_take(
    weight: PackedWeight, indices: jax.Array, *, axis: int = 1, out_dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Take columns or rows of a packed weight, dequantized.

    An embedding table [vocabulary, d] that is packed as the [d, vocabulary] of ``x @ table.T`` is
    looked up by its columns. Values are those of ``unpack``: code * scale in float32, rounded once.

    Args:
        weight: of k rows and n columns, in 8 or 4 bits.
        indices: int32[*any]. Negative ones count from the end; beyond the ends they are the end.
        axis: 1 to take columns, 0 to take rows.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        [*any, k] for columns, [*any, n] for rows. Indices and packed weights have no gradient.

    Raises:
        TypeError: another dtype, or a weight that isn't a PackedWeight.
        ValueError: another axis, a stack, or nothing to take from.
        jax.errors.JaxRuntimeError: on CPU, a panel that is read is damaged.
    """
    dtype = jnp.dtype(out_dtype)
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"packed_take: weight must be a PackedWeight, got {type(weight).__name__}. Pack it "
            "with pack_w8 or pack_w4."
        )
    if dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        raise TypeError(
            f"packed_take: out_dtype must be float32, bfloat16 or float16, got {dtype}."
        )
    if indices.dtype != jnp.int32:
        raise TypeError(f"packed_take: indices must be int32, got {indices.dtype}.")
    if axis not in (0, 1):
        raise ValueError(f"packed_take: axis must be 0 or 1, got {axis}.")
    if len(weight.shape) != 2 or weight.shape[axis] == 0:
        raise ValueError(
            f"packed_take: weight must be one that has something along axis {axis}, got shape "
            f"{weight.shape}."
        )
    weight.check()
    return _run(weight.layout, weight.n, axis, dtype, weight.buffer, indices)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _run(
    layout: Layout, n: int, axis: int, dtype: Any, buffer: jax.Array, indices: jax.Array
) -> jax.Array:
    def kernel(buffer: jax.Array, indices: jax.Array) -> jax.Array:
        flat = indices.reshape(math.prod(indices.shape))
        width = (n, layout.k)[axis]

        def in_jax(buffer: jax.Array, flat: jax.Array) -> jax.Array:
            weight = PackedWeight.of(buffer, n, layout)
            return reference.packed_take(weight, flat, axis=axis, out_dtype=dtype)

        taken = _op.call(
            "packed_take",
            in_jax,
            (buffer, flat),
            jax.ShapeDtypeStruct((flat.shape[0], width), dtype),
            k=layout.k,
            n=n,
            bits=layout.bits,
            axis=axis,
            **layout.attributes,
        )
        return taken.reshape(*indices.shape, width)

    def rule(axis_size: int, in_batched: Sequence[bool], *operands: jax.Array) -> Any:
        return NotImplemented if in_batched[0] else (wrapped(*operands), True)

    wrapped = _op.batched(kernel, rule)
    return wrapped(buffer, indices)
