"""Lookups: rows of an adapter, without multiplying out its factors."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from opt_einsum import get_symbol

from .weight import LoraWeight


def adapter_rows(weight: LoraWeight, indices: jax.Array, params: Any) -> jax.Array | None:
    """Return a ``lax.gather_p`` of ``scale * sum(a * b, axis=-1)``, or None.

    Args:
        weight: the parameter with its adapter.
        indices: integer array [*batch, 1].
        params: the parameters of the primitive, which must look up whole rows along one axis.
    """
    numbers, shape = params["dimension_numbers"], weight.shape
    along = tuple(numbers.start_index_map)
    sizes = [1 if axis in along else n for axis, n in enumerate(shape)]
    if len(along) != 1 or tuple(numbers.collapsed_slice_dims) != along:
        return None
    if numbers.operand_batching_dims or list(params["slice_sizes"]) != sizes:
        return None
    fill = params["fill_value"]
    if fill is not None and not np.isnan(fill):
        return None
    (axis,) = along
    count = indices.ndim - 1
    labels = [get_symbol(n) for n in range(len(shape) + count + 1)]
    batch, own, rank = labels[:count], labels[count:-1], labels[-1]

    def part(factor: jax.Array) -> tuple[jax.Array, str]:
        axes = [i for i in range(len(shape)) if factor.shape[i] > 1 and i != axis]
        kept = [own[i] for i in axes] + [rank]
        if factor.shape[axis] == 1:
            gone = tuple(i for i in range(len(shape)) if i not in axes)
            return lax.squeeze(factor, gone), "".join(kept)
        rows = factor.transpose(axis, *(i for i in range(factor.ndim) if i != axis))
        rows = rows.reshape(shape[axis], *(shape[i] for i in axes), factor.shape[-1])
        found = lax.gather(
            rows,
            indices,
            lax.GatherDimensionNumbers(tuple(range(count, count + rows.ndim - 1)), (0,), (0,)),
            (1, *rows.shape[1:]),
            unique_indices=params["unique_indices"],
            indices_are_sorted=params["indices_are_sorted"],
            mode=params["mode"],
        )
        return found, "".join([*batch, *kept])

    # If all rows share both factors, no gather would give NaN for an index out of bounds.
    if weight.a.shape[axis] == weight.b.shape[axis] == 1:
        return None
    (a, ours), (b, theirs) = part(weight.a), part(weight.b)
    # The result has the axes of a row at the places `offset_dims`, and those of the batch between.
    rows = iter(own[i] for i in range(len(shape)) if i != axis)
    lead = iter(batch)
    total = count + len(shape) - 1
    out = [next(rows) if i in numbers.offset_dims else next(lead) for i in range(total)]
    if any(label not in ours + theirs for label in out):
        return None
    return jnp.einsum(f"{ours},{theirs}->{''.join(out)}", a, b) * weight.scale
