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
from jax.lax import GatherScatterMode
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import quant_numerics as qn
from hijax_trace import ArrayProxy, MoveError, Part, Shared
from interception_core import JaxtapError, get_op

from ..errors import QuantizationError

TAKE = "packed_take"
"""The op that reads rows out of a packed parameter."""


@dataclasses.dataclass(frozen=True)
class Packing:
    """How a parameter is the matrix [K, N] that kernels take, or a stack of those. Hashable.

    Attributes:
        lead: how many of its axes, the first, are stacks: steps of loops.
        k_axes: those that its products contract; the tiled one is the last.
        n_axes: the others.
        group: rows that share a scale, 0 for all.
        bits: 8 or 4, those of a packed code.
        platform: whose kernels read it.
    """

    lead: int
    k_axes: tuple[int, ...]
    n_axes: tuple[int, ...]
    group: int
    bits: int
    platform: str

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

    def form(self, shape: Sequence[int]) -> Any:
        """Return the type of what the op packs a parameter of this shape in, without steps.

        Raises:
            JaxtapError: no installed package has the op.
        """
        return _form(self.op, *self.matrix(shape), self.group, self.platform)

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
            panel = self.form(shape).panel
            if columns % (count * panel):
                return f"{columns} columns on {count} devices are cut within a panel of {panel}"
        return None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class PrepackedWeight(ArrayProxy):
    """A quantized parameter in the order in which a kernel reads it; a pytree of its arrays.

    ``plan.quantize`` makes it of parameters all of whose products run in a kernel. It is what the
    kernels of one platform read; on others it is unpacked at each use. ``plan.convert`` changes the
    form. Under ``scan`` and ``vmap`` the leading axes may be mapped, those of the steps.

    A program that takes one weight of a stack, by a loop or an index, keeps the stack and the
    index: a kernel reads the weight where it lies, and XLA would copy what is cut out for it.

    Attributes:
        packed: what the package's op ``pack_w8`` or ``pack_w4`` returned: a pytree of arrays
            that begin with the leading axes. ``unpack()`` gives quantized values, int8
            [*lead, K, N], and scales, float32 [*lead, K / group, N]; ``panel`` is the columns that
            are packed together, ``question`` what kernels are asked about it, and
            ``product_op(rows, quantizes=)`` the op that multiplies with it.
        qtype: name of the quantized type (static).
        dtype: float dtype of the array that it stands for (static).
        k_sizes: of the contracted axes, in the order in which they make K (static).
        n_sizes: of the others (static).
        group: rows that share a scale, 0 for all (static).
        order: for each axis after the leading ones, which of ``(*k_sizes, *n_sizes)`` it is
            (static).
        inner: axes of the first packed array that are not leading (static).
        platform: whose kernels read it (static).
        index: where there is one, int32 of the leading axes: which of a stack along one axis,
            ``packed``, each weight is; -1 for one that is NaN, looked up out of bounds.
        misses: whether any may be (static).
        places: int32[] each: a program that maps the weight over an axis of columns has one index
            of it, and still a kernel multiplies with all.
        gone: which of ``n_sizes`` these are indices of (static).
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
    platform: str = dataclasses.field(metadata={"static": True})
    index: Any = None
    misses: bool = dataclasses.field(default=False, metadata={"static": True})
    places: tuple[Any, ...] = ()
    gone: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    @property
    def lead(self) -> tuple[int, ...]:
        """Sizes of the leading axes."""
        if self.index is not None:
            return np.shape(self.index)
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

    def codes(self, scale_shape: Sequence[int] | None = None) -> qn.QArray | qn.PackedQArray:
        """Return quantized values and scales, as they were before they were packed.

        Args:
            scale_shape: that of the scales, where they were repeated to be packed.
        """
        q = self.unpacked()
        if scale_shape is not None:
            strides = [n // m for n, m in zip(q.scale.shape, scale_shape, strict=True)]
            scale = jax.lax.slice(q.scale, [0] * q.ndim, q.scale.shape, strides)
            q = dataclasses.replace(q, scale=scale)
        return qn.pack(q) if qn.get_qtype(q.qtype).packable else q

    def restore(self) -> jax.Array:
        """Returns the dequantized array."""
        return _restored(self)

    def stacked(self) -> PrepackedWeight:
        """Return it as a stack along one axis, and the index of each weight in it."""
        if self.index is not None:
            return self
        lead = self.lead
        count, axes = math.prod(lead), len(lead)
        packed = jax.tree.map(lambda x: x.reshape(count, *x.shape[axes:]), self.packed)
        return dataclasses.replace(
            self, packed=packed, index=jnp.arange(count, dtype=jnp.int32).reshape(lead)
        )

    def gathered(self) -> PrepackedWeight:
        """Return it without an index: what that takes of the stack is copied.

        A weight that was looked up out of bounds is another one then.
        """
        if self.index is None:
            return self
        take = functools.partial(jnp.take, indices=self.index, axis=0, mode="clip")
        return dataclasses.replace(
            self, packed=jax.tree.map(take, self.packed), index=None, misses=False
        )

    def step(self, axis: int, is_mapped: bool = False) -> ArrayProxy:
        """Return it with an index per step along an axis: a leading one, or one of columns."""
        lead, rank = len(self.lead), len(self.k_sizes)
        if axis < lead:
            stack = self.stacked()
            shared = jax.tree.map(Shared, (stack.packed, stack.places))
            index = jnp.moveaxis(stack.index, axis, 0)
        elif is_mapped and (part := self.order[axis - lead]) >= rank:
            place = jnp.arange(self.n_sizes[part - rank], dtype=jnp.int32)
            order = tuple(other for other in self.order if other != part)
            gone = (*self.gone, part - rank)
            stack = dataclasses.replace(self, order=order, gone=gone)
            shared = jax.tree.map(Shared, (self.packed, self.places))
            index = jax.tree.map(Shared, self.index)
            shared = (shared[0], (*shared[1], place))
        else:
            return super().step(axis, is_mapped)
        return dataclasses.replace(stack, packed=shared[0], places=shared[1], index=index)

    def parts(self) -> dict[str, Part]:
        """Return what has the leading axes: the index, or the packed arrays."""
        name, value = ("packed", self.packed) if self.index is None else ("index", self.index)
        return {name: Part(value, True, axes=len(self.lead))}

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
        if primitive == "gather" and not lead and not self.gone:
            rows = rows_of(self, jnp.asarray(operands[1]), params)
            if rows is not None:
                return [Rows(rows)]
        if self.gone and primitive != "convert_element_type":
            return self.unpacked().moved(primitive, params, operands)
        # Joined with others, weights are in one stack no longer.
        is_joined = sum(isinstance(x, PrepackedWeight) for x in operands) > 1
        fills = primitive == "gather" and params["mode"] == GatherScatterMode.FILL_OR_DROP
        misses = self.misses or any(getattr(x, "misses", False) for x in operands)
        try:
            if lead and not is_joined:
                stack = self.stacked()
                # As floats, out of bounds there is a NaN.
                index = stack.index.astype(jnp.float32) if fills else stack.index
                stack = dataclasses.replace(stack, index=index, misses=misses or fills)
                held = [stack if x is self else x for x in operands]
                moved = super(PrepackedWeight, stack).moved(primitive, params, held)
                return [_indexed(one) for one in moved] if fills else moved
            if misses:
                raise MoveError(f"{primitive} of weights that may be out of bounds")
            held = [x.gathered() if isinstance(x, PrepackedWeight) else x for x in operands]
            first = next(x for x in held if isinstance(x, PrepackedWeight))
            return super(PrepackedWeight, first).moved(primitive, params, held)
        except MoveError:
            unpacked = [x.unpacked() if isinstance(x, PrepackedWeight) else x for x in operands]
            return self.unpacked().moved(primitive, params, unpacked)


def _indexed(weight: Any) -> Any:
    """Return a weight whose index has a NaN for what is out of bounds, with -1 for that."""
    index = jnp.where(jnp.isnan(weight.index), -1.0, weight.index)
    return dataclasses.replace(weight, index=index.astype(jnp.int32))


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
        weight: the parameter, one, but maybe of a stack.
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


@functools.cache
def _form_of(op: Any, k: int, n: int, group: int, platform: str) -> Any:
    codes = jax.ShapeDtypeStruct((k, n), jnp.int8)
    scale = jax.ShapeDtypeStruct((k // group if group else 1, n), jnp.float32)
    return jax.eval_shape(functools.partial(op, platform=platform), codes, scale)


def _form(op: str, k: int, n: int, group: int, platform: str) -> Any:
    return _form_of(get_op(op), k, n, group, platform)


@jax.jit
def _unpacked(weight: PrepackedWeight) -> qn.QArray:
    index, misses = weight.index, weight.misses
    weight = weight.gathered()
    codes, scale = weight.packed.unpack()
    lead, k_sizes, n_sizes = weight.lead, weight.k_sizes, weight.n_sizes
    count = len(lead)
    if misses:
        missed = jnp.expand_dims(index < 0, (count, count + 1))
        scale = jnp.where(missed, jnp.asarray(jnp.nan, scale.dtype), scale)
    codes = codes.reshape(*lead, *k_sizes, *n_sizes)
    scale = scale.reshape(*lead, *_scale_sizes(k_sizes, weight.group), *n_sizes)
    # All indices of a contracted axis without tiles have the same scale.
    for axis in range(count, count + len(k_sizes) - 1):
        scale = jax.lax.slice_in_dim(scale, 0, 1, axis=axis)
    gone = [len(k_sizes) + part for part in weight.gone]
    order = (*range(count), *(count + part for part in (*weight.order, *gone)))
    codes, scale = codes.transpose(order), scale.transpose(order)
    for place in reversed(weight.places):
        one = functools.partial(jax.lax.dynamic_index_in_dim, index=place, axis=-1, keepdims=False)
        codes, scale = one(codes), one(scale)
    return qn.QArray(
        codes.astype(qn.get_qtype(weight.qtype).storage_dtype),
        scale,
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
    sizes = (*lead, *_scale_sizes(k_sizes, packing.group), *n_sizes)
    for axis, size in enumerate(sizes):
        if scale.shape[axis] != size:
            scale = jnp.repeat(scale, size // scale.shape[axis], axis=axis)
    packed = get_op(packing.op)(codes, scale.reshape(*lead, -1, n), platform=packing.platform)
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
        packing.platform,
    )


def _scale_sizes(k_sizes: Sequence[int], group: int) -> tuple[int, ...]:
    """Returns the sizes of the contracted axes of scales."""
    return (*k_sizes[:-1], k_sizes[-1] // group) if group else (1,) * len(k_sizes)


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
