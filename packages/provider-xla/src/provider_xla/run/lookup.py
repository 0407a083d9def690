"""Lookups: rows of a quantized parameter, gathered as quantized values and scales."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn
from interception_core import OpCall


def lookup_id(call: OpCall) -> str:
    """Return the id of a lookup, which a gather shows under the name that rules have for it."""
    return call.op_id.replace("gather:", "take:")


def looked_up(params: dict[str, Any]) -> tuple[int, ...]:
    """Return the operand axes that a ``gather``'s indices follow."""
    return tuple(params["dimension_numbers"].start_index_map)


def gather(q: qn.QArray, indices: jax.Array, params: dict[str, Any]) -> jax.Array | None:
    """Return what ``lax.gather_p`` gives of the dequantized array.

    Quantized values and scales are gathered in the same way, so that only the rows that were looked
    up are dequantized.

    Args:
        q: the parameter.
        indices: integer array.
        params: the parameters of the primitive.

    Returns:
        The slices; or None where scales can't be gathered with the quantized values.
    """
    if q.ragged_tiles:
        return None
    sizes, along = params["slice_sizes"], looked_up(params)
    batched = params["dimension_numbers"].operand_batching_dims
    if any(q.scale.shape[axis] != q.shape[axis] for axis in batched):
        return None
    mode = lax.GatherScatterMode.from_any(params["mode"])
    fills = mode == lax.GatherScatterMode.FILL_OR_DROP
    for axis, (n, count, size) in enumerate(zip(q.shape, q.scale.shape, sizes, strict=True)):
        if count not in (1, n) and (axis in along or size != n):
            return None
        # An index into a single scale is never out of bounds, so it can't give the NaN of one.
        if fills and axis in along and count < n:
            return None

    def one(x: jax.Array, fill: Any) -> jax.Array:
        # Along an axis with a single scale every index takes that one.
        places = jnp.asarray([x.shape[axis] == q.shape[axis] for axis in along], indices.dtype)
        own = indices * places.reshape((1,) * (indices.ndim - 1) + (-1,))
        slices = tuple(
            size if x.shape[axis] == q.shape[axis] else x.shape[axis]
            for axis, size in enumerate(sizes)
        )
        return lax.gather(
            x,
            own,
            params["dimension_numbers"],
            slices,
            unique_indices=params["unique_indices"],
            indices_are_sorted=params["indices_are_sorted"],
            mode=params["mode"],
            fill_value=fill,
        )

    fill = params["fill_value"]
    if fill is not None and not np.isnan(fill):
        return None
    # Out of bounds, a value of zero with a scale of NaN gives the NaN that a float lookup gives.
    zero, whole = (x if x is None else one(x, 0) for x in (q.zero_point, q.global_scale))
    rows = qn.QArray(
        one(q.qvalue, 0),
        one(q.scale, None),
        zero,
        whole,
        qtype=q.qtype,
        dtype=q.dtype,
    )
    return qn.dequantize(rows)
