"""Packing: how a parameter is a matrix, is packed for kernels, and how one like it is made."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import quant_numerics as qn
from interception_core import get_op

from .packed import (
    INTEGERS,
    PrepackedWeight,
    of_table,
    packed_form,
    packed_scales,
    packed_values,
    scale_sizes,
)
from .phases import Phases

PACK_OPS = ("pack_w4", "pack_w8")
"""The ops that pack weights."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """How a parameter is a matrix [K, N], or a stack. Hashable.

    Attributes:
        lead: the axes of the parameter that make a stack: steps of loops, and examples.
        k_axes: the axes that its contractions contract, in an order in which the rows of a group
            are adjacent.
        n_axes: the other axes.
        group: rows that share a scale, 0 for all.
        bits: bits of a packed value, 8 or 4.
        platform: the platform whose kernels read it.
        table: what packed values stand for; see ``packed_table``.
        repeats: whether all rows share a scale, and ``group`` is how many a kernel sums at once: it
            is packed for each of those.
        pieces: into how many parts a ``shard_map`` cuts the first of ``k_axes``, each packed as a
            matrix; 0 if it doesn't cut that axis.
        windows: whether convolutions with windows of one element are read as windows, and not as
            matmuls.
        phases: in which phases the window of a transposed convolution is packed; None without.
    """

    lead: tuple[int, ...]
    k_axes: tuple[int, ...]
    n_axes: tuple[int, ...]
    group: int
    bits: int
    platform: str
    pieces: int = 0
    windows: bool = False
    table: str = INTEGERS
    repeats: bool = False
    phases: Phases | None = None

    @property
    def op(self) -> str:
        """The op that packs it."""
        return f"pack_w{self.bits}"

    def sizes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the sizes of the axes of K and of N."""
        return tuple(shape[a] for a in self.k_axes), tuple(shape[a] for a in self.n_axes)

    def matrix(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return K and N."""
        k_sizes, n_sizes = self.sizes(shape)
        if self.phases is not None:
            return self.phases.matrix(k_sizes, math.prod(n_sizes))
        return math.prod(k_sizes), math.prod(n_sizes)

    def form(self, shape: Sequence[int]) -> Any:
        """Return the type of one packed matrix of a parameter.

        Raises:
            JaxtapError: no installed package has the op.
        """
        sizes = *self.matrix(shape), self.group
        return packed_form(self.bits, *sizes, self.platform, table=self.table)

    def unshardable(self, shape: Sequence[int], sharding: Any) -> str | None:
        """Return why a parameter with this sharding can't be packed, or None."""
        if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
            return "it is on a mesh with explicit axes"
        if sharding is None or sharding.is_fully_replicated:
            return None
        if not isinstance(sharding, NamedSharding):
            return f"it is sharded by a {type(sharding).__name__}"
        parts = _parts(sharding, len(shape))
        counts = [math.prod(sharding.mesh.shape[name] for name in part) for part in parts]
        return self._uncut(shape, counts, "it is sharded along")

    def uncuttable(self, shape: Sequence[int], counts: Sequence[int]) -> str | None:
        """Return why it can't enter a ``shard_map`` that cuts its axes so, or None."""
        return self._uncut(shape, counts, "shard_map cuts it along")

    def _uncut(self, shape: Sequence[int], counts: Sequence[int], what: str) -> str | None:
        """Return why a packed parameter can't be cut so, or None."""
        rows, *inner = (counts[axis] for axis in self.k_axes)
        if rows not in (1, self.pieces) or any(count > 1 for count in inner):
            return f"{what} an axis that is contracted"
        if rows > 1 and self.group and shape[self.k_axes[0]] % rows == 0:
            k, _ = self.matrix(shape)
            if k // rows % self.group:
                return f"{what} rows that share a scale, {self.group} of them"
        first, *others = self.n_axes or (None,)
        if self.phases is not None and any(counts[axis] > 1 for axis in self.n_axes):
            return f"{what} output channels of a transposed convolution"
        if any(counts[axis] > 1 for axis in others):
            return f"{what} another than the first of its axes that are kept"
        if first is not None and counts[first] > 1:
            count, columns, panel = counts[first], self.matrix(shape)[1], self.form(shape).panel
            if columns % (count * panel):
                return f"{columns} columns on {count} devices are cut within a panel of {panel}"
        return None


def pack(q: qn.QArray | qn.PackedQArray, packing: Packing) -> PrepackedWeight:
    """Pack a parameter on its devices, and wait for that."""
    arrays = jax.tree.leaves(q)
    sharding = getattr(arrays[0], "sharding", None)
    return jax.block_until_ready(_prepack(q, packing, of_panels(packing, q.ndim, sharding)))


def packing_of(weight: PrepackedWeight) -> Packing:
    """Return how a weight was packed."""
    lead = weight.lead_at or tuple(range(len(weight.lead)))
    rest = [axis for axis in range(weight.ndim) if axis not in lead]
    axes = [rest[weight.order.index(part)] for part in range(len(weight.order))]
    rank = len(weight.k_sizes)
    return Packing(
        lead,
        tuple(axes[:rank]),
        tuple(axes[rank:]),
        weight.group,
        weight.bits,
        weight.platform,
        weight.pieces,
        weight.windows,
        weight.table,
        weight.repeats,
        weight.phases,
    )


def packed_type(q: Any, packing: Packing) -> Any:
    """Return the type that ``prepack`` returns for an array's type."""
    return jax.eval_shape(lambda q: _packed(q, packing), q)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _prepack(q: Any, packing: Packing, sharding: Any) -> PrepackedWeight:
    result = _packed(q, packing)
    if sharding is None:
        return result
    return jax.lax.with_sharding_constraint(result, sharding)


def _packed(stored: qn.QArray | qn.PackedQArray, packing: Packing) -> PrepackedWeight:
    q: Any = stored.unpacked()
    first, count = packing.lead, len(packing.lead)
    order = (*first, *packing.k_axes, *packing.n_axes)
    k_sizes, n_sizes = packing.sizes(q.shape)
    lead = [q.shape[axis] for axis in first]
    k, n = math.prod(k_sizes), math.prod(n_sizes)
    qvalue = packed_values(q).transpose(order).reshape(*lead, k, n)
    scale = q.scale.transpose(order)
    # Kernels want a scale for each group and column: repeat those that more elements share.
    sizes = (*lead, *scale_sizes(k_sizes, packing.group), *n_sizes)
    for axis, size in enumerate(sizes):
        if scale.shape[axis] != size:
            scale = jnp.repeat(scale, size // scale.shape[axis], axis=axis)
    given = scale.astype(packed_scales(packing.bits, scale.dtype)).reshape(*lead, -1, n)
    if packing.phases is not None:
        qvalue, given = packing.phases.split(qvalue, k_sizes), packing.phases.columns(given)
    more = of_table(get_op(packing.op), packing.table)
    if q.global_scale is not None:  # one for all, or for each weight of a stack
        whole = q.global_scale.transpose(order)
        whole = whole.reshape(*whole.shape[:count], *(1 for _ in range(bool(packing.pieces) + 1)))
        pieces = (packing.pieces,) if packing.pieces else ()
        more["column_scale"] = jnp.broadcast_to(whole, (*lead, *pieces, n))
    if packing.pieces:
        qvalue = qvalue.reshape(*lead, packing.pieces, -1, n)
        if packing.group:
            given = given.reshape(*lead, packing.pieces, -1, n)
        else:
            given = jnp.repeat(given[..., None, :, :], packing.pieces, axis=-3)
    packed = get_op(packing.op)(qvalue, given, platform=packing.platform, **more)
    places = (*packing.k_axes, *packing.n_axes)
    return PrepackedWeight(
        packed,
        q.qtype,
        jnp.dtype(q.dtype),
        k_sizes,
        n_sizes,
        packing.group,
        tuple(places.index(axis) for axis in range(q.ndim) if axis not in first),
        np.ndim(jax.tree.leaves(packed)[0]) - count,
        packing.platform,
        lead_at=None if first == tuple(range(count)) else first,
        scale_dtype=scale.dtype.name,
        pieces=packing.pieces,
        windows=packing.windows,
        repeats=packing.repeats,
        phases=packing.phases,
    )


def _parts(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """Return the names of the mesh axes that each axis is sharded along."""
    spec = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    return [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]


def of_panels(packing: Packing, ndim: int, sharding: Any) -> NamedSharding | None:
    """Return the packed sharding for that of the quantized values."""
    if not isinstance(sharding, NamedSharding):
        return None
    parts = _parts(sharding, ndim)
    columns = parts[packing.n_axes[0]] if packing.n_axes else ()
    pieces = [parts[packing.k_axes[0]]] if packing.pieces else []
    spec = [*(parts[axis] for axis in packing.lead), *pieces, columns]
    return NamedSharding(sharding.mesh, PartitionSpec(*(part or None for part in spec)))


def mapped_columns(held: Any) -> int:
    """Return how many mapped examples are columns of a packed weight; 1 of anything else."""
    if not isinstance(held, PrepackedWeight):
        return 1
    return math.prod(held.n_sizes[part] for part in held.gone)


def over_columns(fn: Callable[..., Any], side: int, weight: PrepackedWeight) -> Callable[..., Any]:
    """Return a function mapped over an operand's mapped columns.

    Args:
        fn: a function of four arguments, the first two of which are operands.
        side: which of them the weight is.
        weight: the weight.
    """
    for i in range(len(weight.gone)):
        places = tuple(0 if j == i else None for j in range(len(weight.gone)))
        axes: list[Any] = [None] * 4
        axes[side] = dataclasses.replace(weight, packed=None, index=None, places=places)
        fn = jax.vmap(fn, tuple(axes))
    return fn


def alike(given: PrepackedWeight, values: Callable[[tuple[int, ...], Any], Any]) -> PrepackedWeight:
    """Return a parameter as a kernel takes it, given what is packed.

    It is a single one even if the given one is an entry of a stack, and has all indices of mapped
    columns.

    Args:
        given: the weight, or its type.
        values: takes a shape and a dtype, and returns the quantized values.
    """
    weight, rank = jax.eval_shape(PrepackedWeight.gathered, given), len(given.k_sizes)
    order = (*weight.order, *(rank + part for part in weight.gone))
    weight = dataclasses.replace(weight, order=order, gone=(), places=())
    lead = len(weight.lead)
    places = {part: lead + axis for axis, part in enumerate(weight.order)}
    k_axes = tuple(places[part] for part in range(rank))
    n_axes = tuple(places[part] for part in range(rank, len(places)))
    scale = list(weight.shape)
    for axis, count in zip(k_axes, scale_sizes(weight.k_sizes, weight.sharing), strict=True):
        scale[axis] = count
    kind = qn.get_qtype(weight.qtype)
    qvalue = values(weight.shape, kind.storage_dtype)
    ones = jnp.ones(scale, weight.scale_dtype)
    whole = jnp.ones((1,) * len(scale), jnp.float32) if kind.two_level else None
    about = {"qtype": weight.qtype, "dtype": weight.dtype}
    q = qn.QArray(qvalue, ones, global_scale=whole, **about)
    sizes = weight.group, weight.bits, weight.platform
    how = {"table": weight.table, "repeats": weight.repeats, "phases": weight.phases}
    made = pack(q, Packing(tuple(range(lead)), k_axes, n_axes, *sizes, **how))
    places = tuple(jnp.arange(given.n_sizes[part], dtype=jnp.int32) for part in given.gone)
    return dataclasses.replace(
        weight, packed=made.packed, order=given.order, gone=given.gone, places=places
    )
