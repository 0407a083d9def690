"""PrepackedWeight: a parameter in the form that a kernel's package packs weights in."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import quant_numerics as qn
from hijax_trace import ArrayProxy, MoveError, Part
from interception_core import JaxtapError, get_op

from ..errors import QuantizationError

PANELS = {8: 16, 4: 32}
"""Columns that are packed together, by bits: shards along columns are cut between them."""

TAKE = "packed_take"
"""The op that reads rows out of a packed parameter."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """How a parameter is the matrix [K, N] that kernels take, or a stack of those. Hashable.

    Attributes:
        lead: how many of its axes, the first, are stacks: steps of loops.
        k_axes: those that its products contract, in an order in which the rows of a group follow
            one another.
        n_axes: the others.
        group: rows that share a scale, 0 for all.
        bits: 8 or 4, those of a packed code.
    """

    lead: int
    k_axes: tuple[int, ...]
    n_axes: tuple[int, ...]
    group: int
    bits: int

    @property
    def op(self) -> str:
        """The op that packs it."""
        return f"pack_w{self.bits}"

    def sizes(self, shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Returns the sizes of the axes of K and of N."""
        return tuple(shape[a] for a in self.k_axes), tuple(shape[a] for a in self.n_axes)

    def matrix(self, shape: Sequence[int]) -> tuple[int, int]:
        """Returns K and N."""
        k_sizes, n_sizes = self.sizes(shape)
        return math.prod(k_sizes), math.prod(n_sizes)

    def unshardable(self, shape: Sequence[int], sharding: Any) -> str | None:
        """Returns why a parameter that is sharded so can't be packed, or None."""
        if isinstance(sharding, NamedSharding) and AxisType.Explicit in sharding.mesh.axis_types:
            return "it is on a mesh with explicit axes"
        if sharding is None or sharding.is_fully_replicated:
            return None
        if not isinstance(sharding, NamedSharding):
            return f"it is sharded by a {type(sharding).__name__}"
        parts = _parts(sharding, len(shape))
        if any(parts[axis] for axis in self.k_axes):
            return "it is sharded along an axis that is contracted"
        first, *others = self.n_axes or (None,)
        if any(parts[axis] for axis in others):
            return "it is sharded along another than the first of its axes that are kept"
        if first is not None and parts[first]:
            count = math.prod(sharding.mesh.shape[name] for name in parts[first])
            columns = self.matrix(shape)[1]
            panel = PANELS[self.bits]
            if columns % (count * panel):
                return f"{columns} columns on {count} devices are cut within a panel of {panel}"
        return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PrepackedWeight(ArrayProxy):
    """A quantized parameter in the order in which a kernel reads it; a pytree of its arrays.

    ``plan.quantize`` makes it of parameters all of whose products run in a kernel. It is for the
    kernels of this machine's packages: store and send ``plan.quantize(params, prepack=False)``,
    and ``plan.prepack`` that where it is loaded. Under ``scan`` and ``vmap`` the leading axes may
    be mapped, those of the steps.

    Attributes:
        packed: what the package's op ``pack_w8`` or ``pack_w4`` returned: a pytree of arrays
            that begin with the leading axes, with ``unpack() -> (codes, scale)``, int8
            [*lead, K, N] and float32 [*lead, K / group, N].
        qtype: name of the quantized type (static).
        dtype: float dtype of the array that it stands for (static).
        k_sizes: of the contracted axes, in the order in which they make K (static).
        n_sizes: of the others (static).
        group: rows that share a scale, 0 for all (static).
        order: for each axis after the leading ones, which of ``(*k_sizes, *n_sizes)`` it is
            (static).
        inner: axes of the first packed array that are not leading (static).
        scale_dtype: name of the dtype of the scales that were packed (static).
    """

    packed: Any
    qtype: str = dataclasses.field(metadata={"static": True})
    # pyrefly: ignore [bad-override]
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    k_sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    n_sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})
    order: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    inner: int = dataclasses.field(metadata={"static": True})
    scale_dtype: str = dataclasses.field(default="float32", metadata={"static": True})

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the leading axes."""
        shape = np.shape(jax.tree.leaves(self.packed)[0])
        if len(shape) < self.inner:
            raise QuantizationError(
                f"A packed parameter of {self.qtype} with rows {self.k_sizes} and columns "
                f"{self.n_sizes} was taken apart along an axis of its own, as by a scan over "
                "rows. Make the plan for this function, or use plan.quantize(params, "
                "prepack=False)."
            )
        return shape[: len(shape) - self.inner]

    @property
    # pyrefly: ignore [bad-override]
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that this stands for."""
        sizes = (*self.k_sizes, *self.n_sizes)
        return (*self.lead, *(sizes[part] for part in self.order))

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.lead) + len(self.order)

    @property
    def nbytes(self) -> int:
        """Bytes of the packed arrays."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.packed))

    @property
    def bits(self) -> int:
        """Bits of a packed code: 8 or 4."""
        return packed_bits(self.qtype)

    def unpacked(self) -> qn.QArray:
        """Returns its codes and scales, in the order of its axes."""
        return _unpacked(self)

    def restore(self) -> jax.Array:
        """Returns the dequantized array."""
        return _restored(self)

    def parts(self) -> dict[str, Part]:
        """Return the packed arrays, which have the leading axes."""
        return {"packed": Part(self.packed, True, axes=len(self.lead))}

    def astype(self, dtype: Any) -> PrepackedWeight:
        """Return it as the weight of another float dtype."""
        if jnp.dtype(dtype) not in qn.FLOAT_DTYPES:
            raise TypeError(f"a packed parameter must stand for floats, got {dtype}")
        return dataclasses.replace(self, dtype=jnp.dtype(dtype))

    def moved(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Return what a primitive that only moves elements makes of it.

        It stays packed where leading axes are moved, where the order of the others changes, and
        its dtype. Any other move makes it codes and scales.
        """
        lead = len(self.lead)
        if primitive == "transpose":
            permutation = tuple(params["permutation"])
            if permutation[:lead] == tuple(range(lead)):
                order = tuple(self.order[axis - lead] for axis in permutation[lead:])
                return [dataclasses.replace(self, order=order)]
        if primitive == "gather" and not lead:
            rows = rows_of(self, jnp.asarray(operands[1]), params)
            if rows is not None:
                return [Rows(rows)]
        try:
            return super().moved(primitive, params, operands)
        except MoveError:
            unpacked = [x.unpacked() if isinstance(x, PrepackedWeight) else x for x in operands]
            return self.unpacked().moved(primitive, params, unpacked)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class Rows(ArrayProxy):
    """What was looked up in a packed parameter: an array already.

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


def looked_up_axis(params: Mapping[str, Any], shape: Sequence[int]) -> int | None:
    """Return the axis of which a ``lax.gather_p`` takes whole rows; None if it is another one."""
    numbers = params["dimension_numbers"]
    along = tuple(map(int, numbers.start_index_map))
    if len(along) != 1 or tuple(map(int, numbers.collapsed_slice_dims)) != along:
        return None
    if numbers.operand_batching_dims:
        return None
    sizes = [1 if axis in along else n for axis, n in enumerate(shape)]
    return along[0] if list(map(int, params["slice_sizes"])) == sizes else None


def rows_of(
    weight: PrepackedWeight, indices: jax.Array, params: Mapping[str, Any]
) -> jax.Array | None:
    """Return what ``lax.gather_p`` gives of a packed parameter, without unpacking all of it.

    Args:
        weight: the parameter, not a stack.
        indices: integer array [*batch, 1].
        params: those of the primitive.

    Returns:
        The rows, dequantized; None where the packages of kernels can't take them.
    """
    axis, rank = looked_up_axis(params, weight.shape), len(weight.k_sizes)
    fill = params["fill_value"]
    if axis is None or (fill is not None and not np.isnan(fill)):
        return None
    is_column = weight.order[axis] >= rank
    own, other = (weight.n_sizes, weight.k_sizes) if is_column else (weight.k_sizes, weight.n_sizes)
    if len(own) != 1 or jnp.dtype(weight.dtype) not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return None
    try:
        take = get_op(TAKE)
    except JaxtapError:
        return None
    places, last = indices[..., 0], own[0] - 1
    found = take(
        weight.packed,
        jnp.clip(places, 0, last).astype(jnp.int32),
        axis=int(is_column),
        out_dtype=weight.dtype,
    )
    mode = jax.lax.GatherScatterMode.from_any(params["mode"])
    if mode == jax.lax.GatherScatterMode.FILL_OR_DROP:
        inside = (places >= 0) & (places <= last)
        found = jnp.where(inside[..., None], found, jnp.asarray(jnp.nan, found.dtype))
    batch = places.ndim
    found = found.reshape(*places.shape, *other)
    # The other axes in their order in the parameter, at the places that the program has them.
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


def packed_bits(qtype: str) -> int:
    """Returns the bits that codes of a qtype are packed in."""
    return 4 if qn.get_qtype(qtype).bits <= 4 else 8


# Jitted: a program in which it ends up unused has one equation of it, traced once per shape.
@jax.jit
def _restored(weight: PrepackedWeight) -> jax.Array:
    return qn.dequantize(weight.unpacked())


@jax.jit
def _unpacked(weight: PrepackedWeight) -> qn.QArray:
    codes, scale = weight.packed.unpack()
    lead, k_sizes, n_sizes = weight.lead, weight.k_sizes, weight.n_sizes
    count = len(lead)
    codes = codes.reshape(*lead, *k_sizes, *n_sizes)
    scale = scale.reshape(*lead, *scale_sizes(k_sizes, weight.group), *n_sizes)
    order = (*range(count), *(count + part for part in weight.order))
    return qn.QArray(
        codes.astype(qn.get_qtype(weight.qtype).storage_dtype).transpose(order),
        scale.transpose(order).astype(weight.scale_dtype),
        qtype=weight.qtype,
        dtype=weight.dtype,
    )


def prepack(q: qn.QArray | qn.PackedQArray, packing: Packing) -> PrepackedWeight:
    """Packs a parameter, on the devices that it is on; waits until that is done."""
    arrays = jax.tree.leaves(q)
    sharding = getattr(arrays[0], "sharding", None)
    return jax.block_until_ready(_prepack(q, packing, _of_panels(packing, q.ndim, sharding)))


def abstract(q: Any, packing: Packing) -> Any:
    """Returns the type of what ``prepack`` gives for an array of this type."""
    return jax.eval_shape(lambda q: _packed(q, packing), q)


@functools.partial(jax.jit, static_argnums=(1, 2))
def _prepack(q: Any, packing: Packing, sharding: Any) -> PrepackedWeight:
    result = _packed(q, packing)
    if sharding is None:
        return result
    return jax.lax.with_sharding_constraint(result, sharding)


def _packed(q: qn.QArray | qn.PackedQArray, packing: Packing) -> PrepackedWeight:
    q = qn.unpack(q) if isinstance(q, qn.PackedQArray) else q
    count = packing.lead
    order = (*range(count), *packing.k_axes, *packing.n_axes)
    k_sizes, n_sizes = packing.sizes(q.shape)
    lead, (k, n) = q.shape[:count], packing.matrix(q.shape)
    codes = q.qvalue.astype(jnp.int8).transpose(order).reshape(*lead, k, n)
    scale = q.scale.transpose(order)
    sizes = (*lead, *scale_sizes(k_sizes, packing.group), *n_sizes)
    for axis, size in enumerate(sizes):
        if scale.shape[axis] != size:
            scale = jnp.repeat(scale, size // scale.shape[axis], axis=axis)
    # Weights in 4 bits keep scales in float16; float32 holds all others exactly.
    keeps = packing.bits == 4 and scale.dtype == jnp.float16
    given = scale if keeps else scale.astype(jnp.float32)
    packed = get_op(packing.op)(codes, given.reshape(*lead, -1, n))
    places = (*packing.k_axes, *packing.n_axes)
    return PrepackedWeight(
        packed,
        q.qtype,
        jnp.dtype(q.dtype),
        k_sizes,
        n_sizes,
        packing.group,
        tuple(places.index(axis) for axis in range(count, q.ndim)),
        np.ndim(jax.tree.leaves(packed)[0]) - count,
        scale.dtype.name,
    )


def scale_sizes(k_sizes: Sequence[int], group: int) -> tuple[int, ...]:
    """Return the sizes of the contracted axes of scales, for groups of rows; 0 for one group."""
    left, sizes = group or math.prod(k_sizes), []
    for size in reversed(k_sizes):
        within = math.gcd(left, size)
        sizes.append(size // max(within, 1))
        left //= max(within, 1)
    return tuple(reversed(sizes))


def _parts(sharding: NamedSharding, ndim: int) -> list[tuple[str, ...]]:
    """Returns the names of the mesh axes that each axis is sharded along."""
    spec = (*sharding.spec, *(None,) * (ndim - len(sharding.spec)))
    return [(part,) if isinstance(part, str) else tuple(part or ()) for part in spec]


def _of_panels(packing: Packing, ndim: int, sharding: Any) -> NamedSharding | None:
    """Returns the sharding of what is packed, for that of the codes."""
    if not isinstance(sharding, NamedSharding):
        return None
    parts = _parts(sharding, ndim)
    columns = parts[packing.n_axes[0]] if packing.n_axes else ()
    spec = [*parts[: packing.lead], columns]
    return NamedSharding(sharding.mesh, PartitionSpec(*(part or None for part in spec)))
