"""Cuts: what a device has of a packed parameter inside ``shard_map``."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax

from hijax_trace import Shards


def shards_of(weight: Any, counts: Sequence[int], form: Callable[..., Any]) -> Shards | None:
    """Return how devices share a ``PrepackedWeight``; None if it cannot be cut.

    ``counts`` are into how many equal parts each of its axes is cut; ``form`` is ``packed_form``.
    """
    lead, axes, rank = len(weight.lead), weight.axes(), len(weight.k_sizes)
    if all(count == 1 for count in counts):
        return Shards(weight, weight, tuple((None,) * x.ndim for x in jax.tree.leaves(weight)))
    # By leading axis, and by part of rows and columns.
    places = [axes.index(axis) for axis in range(lead)]
    parts = {part: axes.index(lead + i) for i, part in enumerate(weight.order)}
    cut = {part: counts[axis] for part, axis in parts.items() if counts[axis] > 1}
    rows, panels = cut.pop(0, 1), cut.pop(rank, 1)
    columns = math.prod(weight.n_sizes) // panels
    # A device can have whole entries of the stack, whole panels of the first axis of columns, and
    # whole pieces of the first axis of rows. Any other cut would go through packed bytes.
    is_plain = weight.index is None and not weight.gone and weight.lead_at is None
    if not is_plain or cut or rows != max(weight.pieces, 1) or columns % weight.packed.panel:
        return None
    sizes = [n // counts[axis] for n, axis in zip(weight.lead, places, strict=True)]
    k_sizes = (weight.k_sizes[0] // rows, *weight.k_sizes[1:])
    n_sizes = (weight.n_sizes[0] // panels, *weight.n_sizes[1:]) if panels > 1 else weight.n_sizes
    k = math.prod(k_sizes)
    matrix = k, columns, weight.group
    local_form = form(weight.bits, *matrix, weight.platform, weight.scale_dtype, weight.table)
    if weight.pieces:
        sizes.append(1)
        places.append(parts[0])
    packed = jax.tree.map(lambda x: jax.ShapeDtypeStruct((*sizes, *x.shape), x.dtype), local_form)
    local = dataclasses.replace(
        weight, packed=packed, k_sizes=k_sizes, n_sizes=n_sizes, pieces=min(weight.pieces, 1)
    )
    places = [place if counts[place] > 1 else None for place in places]
    places.append(parts[rank] if panels > 1 else None)
    leaves = jax.tree.leaves(weight.packed)
    cuts = tuple((*places, *(None,) * (x.ndim - len(places))) for x in leaves)
    return Shards(weight, local, cuts, lambda own: own.alone())
