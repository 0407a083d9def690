"""Rows and columns out of packed weights, as floats."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..op import Op
from . import reference
from .layout import Layout
from .weight import PackedWeight


@dataclasses.dataclass(frozen=True)
class _Lookup:
    """The static arguments of ``packed_take``."""

    layout: Layout
    n: int
    axis: int
    dtype: Any

    @property
    def width(self) -> int:
        """Return how many numbers each index takes."""
        return (self.n, self.layout.k)[self.axis]


def packed_take(
    weight: PackedWeight, indices: jax.Array, *, axis: int = 1, out_dtype: DTypeLike = jnp.float32
) -> jax.Array:
    """Take columns or rows of a packed weight, dequantized.

    An embedding table [vocabulary, d] that is packed as the [d, vocabulary] of ``x @ table.T`` is
    looked up by its columns. Results are quantized values times scales in float32, rounded once.

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
    config = _Lookup(weight.layout, weight.n, axis, dtype)
    return _run(config, weight.buffer, indices)


@functools.partial(jax.jit, static_argnums=0)
def _run(config: _Lookup, buffer: jax.Array, indices: jax.Array) -> jax.Array:
    taken = _TAKE(config, buffer, indices.reshape(math.prod(indices.shape)))
    return taken.reshape(*indices.shape, config.width)


def _reference(config: _Lookup, buffer: jax.Array, indices: jax.Array) -> jax.Array:
    weight = PackedWeight.of(buffer, config.n, config.layout)
    return reference.take(weight, indices, config.axis, config.dtype)


def _results(config: _Lookup, buffer: jax.Array, indices: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((indices.shape[0], config.width), config.dtype)


def _attributes(config: _Lookup, *_: jax.Array) -> dict[str, Any]:
    fixed = {"k": config.layout.k, "n": config.n, "bits": config.layout.bits, "axis": config.axis}
    return fixed | config.layout.attributes


def _batch(run: Any, config: _Lookup, size: int, in_batched: Any, *operands: jax.Array) -> Any:
    """Merge the mapped axis into the indices."""
    if in_batched[0]:
        return NotImplemented
    buffer, indices = operands
    taken = run(config, buffer, indices.reshape(size * indices.shape[1]))
    return taken.reshape(size, indices.shape[1], config.width), True


_TAKE = Op("packed_take", _reference, results=_results, attributes=_attributes, batch=_batch)
