"""Rows of packed parameters: a lookup reads them without unpacking the others."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode

from hijax_trace import ArrayProxy
from interception_core import JaxtapError, get_op

TAKE = "packed_take"
"""The op that reads rows out of a packed parameter."""


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Rows(ArrayProxy):
    """Rows looked up in a packed parameter, as a float array.

    Attributes:
        values: the array.
    """

    values: jax.Array

    @property
    # pyrefly: ignore [bad-override]
    def shape(self) -> tuple[int, ...]:
        """Shape of the array."""
        return self.values.shape

    @property
    # pyrefly: ignore [bad-override]
    def dtype(self) -> np.dtype:
        """Dtype of the array."""
        return self.values.dtype

    def restore(self) -> jax.Array:
        """Return the array."""
        return self.values


def looked_up_axes(params: Mapping[str, Any], shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the axes that a ``lax.gather_p`` indexes while keeping the others.

    None if it takes only a part of the others, or windows.
    """
    numbers = params["dimension_numbers"]
    along = tuple(map(int, numbers.start_index_map))
    if sorted(along) != sorted(map(int, numbers.collapsed_slice_dims)):
        return None
    if numbers.operand_batching_dims:
        return None
    sizes = [1 if axis in along else n for axis, n in enumerate(shape)]
    return along if list(map(int, params["slice_sizes"])) == sizes else None


def sliced_axis(sizes: Sequence[int], shape: Sequence[int]) -> int | None:
    """Return the axis along which a slice takes one row of many, all of it; None without."""
    cut = [axis for axis, (size, n) in enumerate(zip(sizes, shape, strict=True)) if size != n]
    return cut[0] if len(cut) == 1 and sizes[cut[0]] == 1 else None


def row_of(weight: Any, starts: Sequence[Any], sizes: Sequence[int]) -> jax.Array | None:
    """Return a ``lax.dynamic_slice_p`` that takes one row, dequantized; None if kernels can't."""
    axis = sliced_axis(sizes, weight.shape)
    if axis is None:
        return None
    # The batch of the lookup is one index. It is the axis of size 1.
    offsets = tuple(other for other in range(len(sizes)) if other != axis)
    params = {
        "dimension_numbers": jax.lax.GatherDimensionNumbers(offsets, (axis,), (axis,)),
        "slice_sizes": tuple(sizes),
        "mode": GatherScatterMode.CLIP,
        "fill_value": None,
    }
    return rows_of(weight, jnp.asarray(starts[axis]).reshape(1, 1), params)


def rows_of(weight: Any, indices: jax.Array, params: Mapping[str, Any]) -> jax.Array | None:
    """Return a ``lax.gather_p`` that takes rows, dequantized; None if kernels can't."""
    axes, rank = looked_up_axes(params, weight.shape), len(weight.k_sizes)
    fill = params["fill_value"]
    if axes is None or len(axes) != 1 or (fill is not None and not np.isnan(fill)):
        return None
    (axis,) = axes
    is_column = weight.order[axis] >= rank
    own, other = (weight.n_sizes, weight.k_sizes) if is_column else (weight.k_sizes, weight.n_sizes)
    if len(own) != 1 or jnp.dtype(weight.dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return None
    try:
        take = get_op(TAKE)
    except JaxtapError:
        return None
    weight = weight.gathered()
    places, last = indices[..., 0], own[0] - 1
    found = take(
        weight.packed,
        jnp.clip(places, 0, last).astype(jnp.int32),
        axis=int(is_column),
        out_dtype=weight.dtype,
    )
    mode = GatherScatterMode.from_any(params["mode"])
    if mode == GatherScatterMode.FILL_OR_DROP:
        inside = (places >= 0) & (places <= last)
        found = jnp.where(inside[..., None], found, jnp.asarray(jnp.nan, found.dtype))
    batch = places.ndim
    found = found.reshape(*places.shape, *other)
    # Put the other axes, in the parameter's order, at the places where the program wants them.
    parts = [part for at, part in enumerate(weight.order) if at != axis]
    first = 0 if is_column else rank
    offsets = tuple(map(int, params["dimension_numbers"].offset_dims))
    order = [0] * found.ndim
    for place, part in zip(offsets, parts, strict=True):
        order[place] = batch + part - first
    rest = [place for place in range(found.ndim) if place not in offsets]
    for at, place in enumerate(rest):
        order[place] = at
    return found.transpose(order)
