"""Rows of a table as EMBEDDING_LOOKUP, with a scale per row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def gather(
    operand: jax.Array,
    start_indices: jax.Array,
    dimension_numbers: lax.GatherDimensionNumbers,
    slice_sizes: Any,
    **options: Any,
) -> jax.Array:
    """Return ``jax.lax.gather``; the rows of a table in one operation.

    Indices are those of rows that there are, or are clipped to them by the mode "clip".
    """
    if not is_row_lookup(operand.shape, start_indices.shape, dimension_numbers, slice_sizes):
        return lax.gather(operand, start_indices, dimension_numbers, slice_sizes, **options)
    ids = start_indices[..., 0]
    mode = options.get("mode")
    if mode is not None and lax.GatherScatterMode.from_any(mode) == lax.GatherScatterMode.CLIP:
        ids = jnp.clip(ids, 0, operand.shape[0] - 1)
    return rows(operand, ids)


def is_row_lookup(
    shape: tuple[int, ...],
    index_shape: tuple[int, ...],
    numbers: lax.GatherDimensionNumbers,
    slice_sizes: Any,
) -> bool:
    """Return whether a gather takes whole rows in its indices' order."""
    return (
        len(shape) == 2
        and tuple(slice_sizes) == (1, shape[1])
        and tuple(numbers.collapsed_slice_dims) == (0,)
        and tuple(numbers.start_index_map) == (0,)
        and tuple(numbers.offset_dims) == (len(index_shape) - 1,)
        and not numbers.operand_batching_dims
    )


def rows(table: jax.Array, ids: jax.Array) -> jax.Array:
    """Return the rows of a table by their numbers."""

    def body(ids: jax.Array, table: jax.Array) -> jax.Array:
        return table.at[ids].get(mode="promise_in_bounds")

    flat = ids.reshape(-1).astype(jnp.int32)
    found = lax.composite(body, name="odml.embedding_lookup")(flat, table)
    return found.reshape(*ids.shape, table.shape[1])
