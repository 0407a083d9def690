"""Packed parameters: how one is a matrix for kernels, what travels through programs, and back."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.lax import GatherScatterMode
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import quant_numerics as qn
from hijax_trace import ArrayProxy, MoveError, Part, Shards, Shared
from interception_core import get_op, quick_init
from quant_numerics import Convolution, RaggedMatmul

from ..errors import QuantizationError
from .convolution import convolve
from .matmul import (
    ALONE,
    Added,
    Between,
    NoKernel,
    Product,
    Rotation,
    can_add,
    check_dtypes,
    multiply,
    multiply_groups,
)
from .phases import Phases
from .rows import Rows, row_of, rows_of

INTEGERS = "int4"
"""What values stand for that are integers: themselves."""
_BOOKS = ("nf4", "iq4_nl")
_PACKED_SCALES = tuple(map(jnp.dtype, (jnp.float16, jnp.float8_e8m0fnu, jnp.float8_e4m3fn)))

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


@jax.tree_util.register_dataclass
@quick_init
@dataclasses.dataclass(frozen=True, eq=False)
class PrepackedWeight(qn.StoredForm):
    """A quantized parameter in a kernel's memory order; a pytree of arrays.

    ``plan.quantize`` makes it of parameters whose contractions all run in a kernel. The kernels of
    one platform read it; on other platforms it is unpacked at each use. ``plan.convert`` changes
    the form. ``scan`` and ``vmap`` may map its leading axes, which are steps.

    If a program takes one weight of a stack, by a loop or an index, the stack and the index travel
    on: a kernel reads the weight where it lies, where XLA would copy it out of the stack.

    Attributes:
        packed: what the package's op ``pack_w8`` or ``pack_w4`` returned: a pytree of arrays that
            begin with the leading axes. ``unpack()`` gives quantized values, int8 [*lead, K, N],
            and scales [*lead, K / group, N], and float32 [*lead, N] if scales are scaled;
            ``panel`` is how many columns are packed
            together, ``question`` the facts that kernels decide by, and
            ``matmul_op(quantizes=)`` the op that multiplies with it. On the platforms in
            ``rotates`` its ops take ``signs=`` and ``rotation=``; if it has a true ``scales``,
            ``x_scale=``; if a true ``adds``, ``bias=`` and ``residual=``; if a true ``rounds``, its
            op of convolutions takes int8 activations and ``y_scale=``. ``conv_op`` is that op, for
            int8 activations, and ``float_conv_op`` the one for floats; None for none.
        qtype: name of the quantized type (static).
        dtype: float dtype of the array that it stands for (static).
        k_sizes: sizes of the contracted axes, in the order in which they make K (static).
        n_sizes: sizes of the other axes (static).
        group: rows that share a scale, 0 for all (static).
        order: for each axis after the leading ones, which of ``(*k_sizes, *n_sizes)`` it is
            (static).
        inner: how many axes of the first packed array are not leading (static).
        platform: the platform whose kernels read it (static).
        index: int32 of the shape of the leading axes, if ``packed`` is a stack along one axis:
            which entry each weight is; -1 for one that was looked up out of bounds and is NaN.
            None if ``packed`` has the leading axes.
        misses: whether ``index`` may hold -1 (static).
        places: int32[] each. If a program maps the weight over an axis of columns, this is the
            index along that axis; a kernel still multiplies with all columns at once.
        gone: which of ``n_sizes`` the ``places`` are indices of (static).
        lead_at: which axes the leading ones are, in their order; None for the first (static).
        scale_dtype: name of the dtype of the scales that were packed (static).
        pieces: into how many parts a ``shard_map`` cuts it along the first of ``k_sizes``. Each
            part is packed as a matrix, and the parts are an axis of ``packed`` after the leading
            ones. 0 if nothing cuts it there (static).
        windows: whether the plan reads a convolution with a window of one element as one of a
            window, and not as a matmul (static).
        repeats: whether all rows share a scale, which is packed for each ``group`` (static).
        phases: in which phases the window of a transposed convolution is packed; None without
            (static).
    """

    packed: Any
    # pyrefly: ignore [bad-override]
    qtype: str = dataclasses.field(metadata={"static": True})
    # pyrefly: ignore [bad-override]
    dtype: np.dtype = dataclasses.field(metadata={"static": True})
    k_sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    n_sizes: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    group: int = dataclasses.field(metadata={"static": True})
    order: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    inner: int = dataclasses.field(metadata={"static": True})
    # pyrefly: ignore [bad-override]
    platform: str = dataclasses.field(metadata={"static": True})
    index: Any = None
    misses: bool = dataclasses.field(default=False, metadata={"static": True})
    places: tuple[Any, ...] = ()
    gone: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})
    lead_at: tuple[int, ...] | None = dataclasses.field(default=None, metadata={"static": True})
    scale_dtype: str = dataclasses.field(default="float32", metadata={"static": True})
    pieces: int = dataclasses.field(default=0, metadata={"static": True})
    windows: bool = dataclasses.field(default=False, metadata={"static": True})
    repeats: bool = dataclasses.field(default=False, metadata={"static": True})
    phases: Phases | None = dataclasses.field(default=None, metadata={"static": True})

    @functools.cached_property
    def lead(self) -> tuple[int, ...]:
        """Return the sizes of the leading axes."""
        if self.index is not None:
            return np.shape(self.index)
        shape = np.shape(jax.tree.leaves(self.packed)[0])
        if len(shape) < self.inner:
            raise QuantizationError(
                f"A packed parameter of {self.qtype} with rows {self.k_sizes} and columns "
                f"{self.n_sizes} was taken apart along a column axis, as by a scan over rows, or "
                "by a vmap around the function of the plan. Make the plan for this function, or "
                "use plan.quantize(params, prepack=False)."
            )
        return shape[: len(shape) - self.inner]

    @functools.cached_property
    # pyrefly: ignore [bad-override]
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that this stands for."""
        return self._arranged((*self.k_sizes, *self.n_sizes))

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Shape of the scales of that array."""
        return self._arranged((*scale_sizes(self.k_sizes, self.sharing), *self.n_sizes))

    @property
    def sharing(self) -> int:
        """How many rows share a scale, 0 for all."""
        return 0 if self.repeats else self.group

    def _arranged(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return sizes of rows and columns as those of the axes."""
        own = tuple(sizes[part] for part in self.order)
        if not self.lead:
            return own
        first = (*self.lead, *own)
        return tuple(first[axis] for axis in self.axes())

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.lead) + len(self.order)

    def axes(self) -> list[int]:
        """Return each axis's number when the leading axes are counted first."""
        lead, ndim = len(self.lead), self.ndim
        places = {axis: i for i, axis in enumerate(self.lead_at or range(lead))}
        rest = iter(range(lead, ndim))
        return [places[axis] if axis in places else next(rest) for axis in range(ndim)]

    def transposed(self, permutation: Sequence[int]) -> PrepackedWeight:
        """Return a permuted view: the packed bytes stay as they are."""
        lead, old = len(self.lead), self.axes()
        axes = [old[axis] for axis in permutation]
        order = tuple(self.order[axis - lead] for axis in axes if axis >= lead)
        first, stack = [axis for axis in axes if axis < lead], self
        if first != sorted(first):
            stack = self.stacked()
            stack = dataclasses.replace(stack, index=stack.index.transpose(first))
        return dataclasses.replace(stack, order=order, lead_at=_lead_at(axes, lead))

    @property
    def nbytes(self) -> int:
        """Return the bytes of the packed arrays."""
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.packed))

    @property
    def bits(self) -> int:
        """Return the bits of a packed value: 8 or 4."""
        return packed_bits(self.qtype)

    @property
    def table(self) -> str:
        """Return what packed values stand for; see ``packed_table``."""
        table = packed_table(self.qtype)
        assert table is not None
        return table

    def unpacked(self) -> qn.QArray:
        """Return its quantized values and scales, in the order of its axes."""
        return _unpacked(self)

    def portable(self, scale_shape: Sequence[int] | None = None) -> qn.QArray | qn.PackedQArray:
        """Return quantized values and scales, as they were before they were packed.

        Args:
            scale_shape: the shape that scales had before packing repeated them; None if it did not.
        """
        return portable(self, None if scale_shape is None else tuple(scale_shape))

    def to_parts(self, scale_shape: Sequence[int] | None = None) -> qn.Parts:
        """Return the parts of its portable form, which are computed when they are written."""
        shape = None if scale_shape is None else tuple(scale_shape)
        parts = portable.eval_shape(self, shape).to_parts()
        return parts._replace(make=lambda: portable(self, shape).to_parts().arrays)

    @property
    def can_add(self) -> bool:
        """Return whether a kernel may add to its columns."""
        return can_add(self)

    @property
    def gives_int8(self) -> bool:
        """Return whether a kernel takes and gives int8 activations where it convolves."""
        return getattr(self.packed, "rounds", False)

    # pyrefly: ignore [bad-override]
    def contract(
        self,
        contraction: qn.Contraction,
        side: int,
        x: Any,
        *,
        how: qn.HowToQuantize | None,
        calibration: qn.Calibration | None,
        extras: Sequence[jax.Array],
        added: Added,
        rotation: Rotation | None = None,
        between: Between = ALONE,
    ) -> Any:
        """Return the contraction of a kernel, or NotImplemented; see ``StoredForm``.

        Further arguments are a rotation of ``x`` that the kernel does first, and what a chain of
        convolutions has in int8.
        """
        if not isinstance(x, jax.Array) or _is_explicit(x):
            return NotImplemented
        symmetric = how is not None and calibration is not None and calibration.lower is None
        scale = qn.scale_of(calibration, how.qtype)[0].reshape(()) if symmetric else None  # type: ignore[arg-type, union-attr]
        has_zero_point = calibration is not None and scale is None
        try:
            dtype = check_dtypes(contraction, x, self.dtype)
            asked = Product(contraction, how, scale, x, self, side, dtype)
            if isinstance(contraction, RaggedMatmul) and self.phases is None:
                if between.y_scale is not None:
                    return NotImplemented  # int8 results of rows in groups
                return added.to(multiply_groups(asked, *extras))
            if self.lead or self.pieces:
                return NotImplemented  # a stack, or packed in pieces for shard_map
            if isinstance(contraction, Convolution):
                is_matmul = contraction.is_pointwise(self.shape)
                try:
                    if (self.windows or not is_matmul) and rotation is None and not has_zero_point:
                        return convolve(asked, added, between)
                except NoKernel:  # of a program that the plan is not for
                    if not is_matmul:
                        raise
            if self.phases is not None:
                return NotImplemented  # packed for a transposed convolution
            if between.y_scale is not None:
                return NotImplemented  # int8 results of a matmul
            return multiply(asked, rotation, added)
        except NoKernel:
            return NotImplemented

    def restore(self) -> jax.Array:
        """Return the dequantized array."""
        return _restored(self)

    def stacked(self) -> PrepackedWeight:
        """Return a stack along one axis, and each weight's index in it."""
        if self.index is not None:
            return self
        lead = self.lead
        count, axes = math.prod(lead), len(lead)
        packed = jax.tree.map(lambda x: x.reshape(count, *x.shape[axes:]), self.packed)
        return dataclasses.replace(
            self, packed=packed, index=jnp.arange(count, dtype=jnp.int32).reshape(lead)
        )

    def gathered(self) -> PrepackedWeight:
        """Return the weight without an index, copying its part of the stack.

        For a weight that was looked up out of bounds this is another entry, not NaN.
        """
        if self.index is None:
            return self
        take = functools.partial(jnp.take, indices=self.index, axis=0, mode="clip")
        return dataclasses.replace(
            self, packed=jax.tree.map(take, self.packed), index=None, misses=False
        )

    def step(self, axis: int, is_mapped: bool = False) -> ArrayProxy:
        """Return the weight with an index per step along an axis.

        Args:
            axis: the axis that a loop or ``vmap`` goes along.
            is_mapped: whether it is a ``vmap``.
        """
        lead, rank, axes = len(self.lead), len(self.k_sizes), self.axes()
        which = axes.pop(axis)
        lead_at = _lead_at(axes, lead)
        if which < lead:
            stack = self.stacked()
            shared = jax.tree.map(Shared, (stack.packed, stack.places))
            index = jnp.moveaxis(stack.index, which, 0)
        elif is_mapped and (part := self.order[which - lead]) >= rank:
            place = jnp.arange(self.n_sizes[part - rank], dtype=jnp.int32)
            order = tuple(other for other in self.order if other != part)
            gone = (*self.gone, part - rank)
            stack = dataclasses.replace(self, order=order, gone=gone)
            shared = jax.tree.map(Shared, (self.packed, self.places))
            index = jax.tree.map(Shared, self.index)
            shared = (shared[0], (*shared[1], place))
        else:
            return super().step(axis, is_mapped)
        return dataclasses.replace(
            stack, packed=shared[0], places=shared[1], index=index, lead_at=lead_at
        )

    def shards(self, counts: Sequence[int]) -> Shards:
        """Return how the devices of a ``shard_map`` share it.

        A device can have whole entries of the stack, whole panels of the first axis of columns, and
        whole pieces of the first axis of rows. Any other cut would go through packed bytes: for it
        the weight is unpacked to quantized values and scales.

        Args:
            counts: into how many equal parts each of its axes is cut.
        """
        lead, axes, rank = len(self.lead), self.axes(), len(self.k_sizes)
        if all(count == 1 for count in counts):
            return Shards(self, self, tuple((None,) * x.ndim for x in jax.tree.leaves(self)))
        # By leading axis, and by part of rows and columns.
        places = [axes.index(axis) for axis in range(lead)]
        parts = {part: axes.index(lead + i) for i, part in enumerate(self.order)}
        cut = {part: counts[axis] for part, axis in parts.items() if counts[axis] > 1}
        rows, panels = cut.pop(0, 1), cut.pop(rank, 1)
        columns = math.prod(self.n_sizes) // panels
        is_plain = self.index is None and not self.gone and self.lead_at is None
        is_plain = is_plain and self.phases is None  # each has its part of all columns
        if not is_plain or cut or rows != max(self.pieces, 1) or columns % self.packed.panel:
            return self.unpacked().shards(counts)
        sizes = [n // counts[axis] for n, axis in zip(self.lead, places, strict=True)]
        k_sizes = (self.k_sizes[0] // rows, *self.k_sizes[1:])
        n_sizes = (self.n_sizes[0] // panels, *self.n_sizes[1:]) if panels > 1 else self.n_sizes
        k = math.prod(k_sizes)
        matrix = k, columns, self.group
        local_form = packed_form(self.bits, *matrix, self.platform, self.scale_dtype, self.table)
        if self.pieces:
            sizes.append(1)
            places.append(parts[0])
        packed = jax.tree.map(
            lambda x: jax.ShapeDtypeStruct((*sizes, *x.shape), x.dtype), local_form
        )
        local = dataclasses.replace(
            self, packed=packed, k_sizes=k_sizes, n_sizes=n_sizes, pieces=min(self.pieces, 1)
        )
        places = [place if counts[place] > 1 else None for place in places]
        places.append(parts[rank] if panels > 1 else None)
        leaves = jax.tree.leaves(self.packed)
        cuts = tuple((*places, *(None,) * (x.ndim - len(places))) for x in leaves)
        return Shards(self, local, cuts, lambda own: own.alone())

    def alone(self) -> PrepackedWeight:
        """Return the weight without its axis of pieces if that is 1."""
        if self.pieces != 1:
            return self
        packed = jax.tree.map(lambda x: jax.lax.squeeze(x, [len(self.lead)]), self.packed)
        return dataclasses.replace(self, packed=packed, pieces=0, inner=self.inner - 1)

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

        It stays packed if leading axes are moved, or if the order of the other axes or the dtype
        changes. For any other move it is unpacked to quantized values and scales.
        """
        lead = len(self.lead)
        if primitive == "transpose":
            return [self.transposed(params["permutation"])]
        is_matrix = not (lead or self.gone or self.pieces or self.phases)
        if primitive == "gather" and is_matrix:
            rows = rows_of(self, jnp.asarray(operands[1]), params)
            if rows is not None:
                return [Rows(rows)]
        if primitive == "dynamic_slice" and is_matrix:
            row = row_of(self, operands[1:], params["slice_sizes"])
            if row is not None:
                return [Rows(row)]
        weights = [x for x in operands if isinstance(x, PrepackedWeight)]
        # Weights that are joined with others no longer lie in one stack.
        is_joined = len(weights) > 1
        fills = primitive == "gather" and params["mode"] == GatherScatterMode.FILL_OR_DROP
        misses = self.misses or any(getattr(x, "misses", False) for x in operands)
        try:
            in_order = not any(one.gone or one.lead_at for one in weights)
            if not in_order and primitive != "convert_element_type":
                raise MoveError(f"{primitive} of columns, or of a stack along a later axis")
            if lead and not is_joined:
                stack = self.stacked()
                # As floats, indices that are gathered out of bounds become NaN, and -1 below.
                index = stack.index.astype(jnp.float32) if fills else stack.index
                stack = dataclasses.replace(stack, index=index, misses=misses or fills)
                held = [stack if x is self else x for x in operands]
                moved = super(PrepackedWeight, stack).moved(primitive, params, held)
                return [_indexed(one) for one in moved] if fills else moved
            if misses:
                raise MoveError(f"{primitive} of weights that may be out of bounds")
            held = [x.gathered() if isinstance(x, PrepackedWeight) else x for x in operands]
            return super(PrepackedWeight, self.gathered()).moved(primitive, params, held)
        except MoveError:
            unpacked = [x.unpacked() if isinstance(x, PrepackedWeight) else x for x in operands]
            return self.unpacked().moved(primitive, params, unpacked)


qn.register_serialization(
    PrepackedWeight,
    encode=lambda phases: [phases.counts, phases.groups],
    decode=lambda found: Phases(tuple(found[0]), found[1]),
)


def _lead_at(axes: Sequence[int], lead: int) -> tuple[int, ...] | None:
    """Return where the leading axes are; None where they are the first."""
    found = tuple(i for i, axis in enumerate(axes) if axis < lead)
    return None if found == tuple(range(len(found))) else found


def _indexed(weight: Any) -> Any:
    """Return a weight with index -1 where its index is out of bounds."""
    index = jnp.where(jnp.isnan(weight.index), -1.0, weight.index)
    return dataclasses.replace(weight, index=index.astype(jnp.int32))


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
    """Return the type that ``pack`` returns for an array's type."""
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


def packed_form(
    bits: int,
    k: int,
    n: int,
    group: int,
    platform: str,
    scale_dtype: str = "float32",
    table: str = INTEGERS,
) -> Any:
    """Return the type of what a matrix [k, n] is packed in.

    Raises:
        JaxtapError: no installed package packs in so many bits.
    """
    scales = packed_scales(bits, scale_dtype)
    return _form_of(get_op(f"pack_w{bits}"), k, n, group, platform, scales, table)


@functools.lru_cache(maxsize=4096)
def _form_of(
    op: Any, k: int, n: int, group: int, platform: str, scale_dtype: str, table: str
) -> Any:
    qvalue = jax.ShapeDtypeStruct((k, n), jnp.int8)
    scale = jax.ShapeDtypeStruct((k // group if group else 1, n), jnp.dtype(scale_dtype))
    pack = functools.partial(op, platform=platform, **of_table(op, table))
    if scale.dtype != jnp.float8_e4m3fn:
        return jax.eval_shape(pack, qvalue, scale)
    return jax.eval_shape(pack, qvalue, scale, column_scale=jax.ShapeDtypeStruct((n,), jnp.float32))


def of_table(op: Any, table: str) -> dict[str, Any]:
    """Return what an op that packs is told about what values stand for.

    Raises:
        ValueError: it packs integers alone.
    """
    if table == INTEGERS:
        return {}
    if "table" not in inspect.signature(op).parameters:
        raise ValueError(f"no kernel takes weights in {table}, XLA dequantizes them")
    return {"table": table}


def packed_bits(qtype: str) -> int:
    """Return the bits that quantized values of a qtype are packed in."""
    return 4 if qn.get_qtype(qtype).bits <= 4 else 8


def packed_table(qtype: str) -> str | None:
    """Return what the packed values of a qtype stand for, as an op that packs names it.

    "int4" for integers, which stand for themselves, in 8 bits too; else the table that they are
    places in. None for a qtype that no op packs.
    """
    kind = qn.get_qtype(qtype)
    if kind.kind == "int":
        return INTEGERS if kind.bits <= 8 else None
    if kind.storage_dtype == jnp.float4_e2m1fn:
        return "e2m1"
    # By what they stand for: a plugin may call its formats by these names.
    return next((name for name in _BOOKS if qn.QTYPES[name].codebook == kind.codebook), None)


def packed_scales(bits: int, dtype: Any) -> str:
    """Return the dtype that scales are packed in: float32 holds all others exactly."""
    return jnp.dtype(dtype).name if bits == 4 and jnp.dtype(dtype) in _PACKED_SCALES else "float32"


def packed_values(q: qn.QArray) -> jax.Array:
    """Return quantized values as they are packed, int8: integers, or places in a table."""
    if q.qvalue.dtype == jnp.float4_e2m1fn:
        return jax.lax.bitcast_convert_type(q.qvalue, jnp.uint4).astype(jnp.int8)
    return q.qvalue.astype(jnp.int8)


def _values(packed: jax.Array, qtype: str) -> jax.Array:
    """Return what ``packed_values`` was given."""
    dtype = qn.get_qtype(qtype).storage_dtype
    if dtype == jnp.float4_e2m1fn:
        return jax.lax.bitcast_convert_type(packed.astype(jnp.uint4), dtype)
    return packed.astype(dtype)


# Jitted once: weights of one layout share a program.
@functools.partial(jax.jit, static_argnums=1)
def portable(
    weight: PrepackedWeight, scale_shape: tuple[int, ...] | None
) -> qn.QArray | qn.PackedQArray:
    """Return a weight's quantized values and scales; see ``PrepackedWeight.portable``."""
    q = weight.unpacked()
    if scale_shape is not None:
        strides = [n // m for n, m in zip(q.scale.shape, scale_shape, strict=True)]
        scale = jax.lax.slice(q.scale, [0] * q.ndim, q.scale.shape, strides)
        q = dataclasses.replace(q, scale=scale)
    return qn.pack(q) if qn.get_qtype(q.qtype).packable else q


# Jitted: a program that doesn't use the result has one equation of it, traced once per shape.
@jax.jit
def _restored(weight: PrepackedWeight) -> jax.Array:
    return qn.dequantize(weight.unpacked())


@jax.jit
def _unpacked(weight: PrepackedWeight) -> qn.QArray:
    index, misses = weight.index, weight.misses
    weight = weight.gathered()
    lead, k_sizes, n_sizes = weight.lead, weight.k_sizes, weight.n_sizes
    count = len(lead)
    qvalue, scale, *columns = weight.packed.unpack()
    if misses:
        missed = jnp.expand_dims(index < 0, (count, count + 1))
        scale = jnp.where(missed, jnp.asarray(jnp.nan, scale.dtype), scale)
    if weight.pieces and not weight.group:
        scale = jax.lax.index_in_dim(scale, 0, count, keepdims=False)  # pieces have equal scales
    if weight.phases is not None:
        qvalue, scale = weight.phases.joined(qvalue, k_sizes), weight.phases.channels(scale)
    qvalue = qvalue.reshape(*lead, *k_sizes, *n_sizes)
    if weight.repeats:
        scale = scale.reshape(*lead, -1, scale.shape[-1])[..., :1, :]
    scale = scale.reshape(*lead, *scale_sizes(k_sizes, weight.sharing), *n_sizes)
    gone = [len(k_sizes) + part for part in weight.gone]
    order = (*range(count), *(count + part for part in (*weight.order, *gone)))
    qvalue, scale = qvalue.transpose(order), scale.transpose(order)
    for place in reversed(weight.places):
        one = functools.partial(jax.lax.dynamic_index_in_dim, index=place, axis=-1, keepdims=False)
        qvalue, scale = one(qvalue), one(scale)
    axes, whole = weight.axes(), None
    for column in columns:
        if weight.pieces:
            column = jax.lax.index_in_dim(column, 0, count, keepdims=False)
        # It is one for all columns, but where one of a column's scales is NaN.
        whole = jnp.nanmax(column, axis=-1).reshape(*lead, *(1 for _ in weight.order))
        whole = whole.transpose(axes)
    qvalue, scale = qvalue.transpose(axes), scale.transpose(axes)
    return qn.QArray(
        _values(qvalue, weight.qtype),
        scale.astype(weight.scale_dtype),
        global_scale=whole,
        qtype=weight.qtype,
        dtype=weight.dtype,
    )


def scale_sizes(k_sizes: Sequence[int], group: int) -> tuple[int, ...]:
    """Return the sizes of scales along contracted axes, outer to inner; ``group`` 0 is all rows."""
    left, sizes = group or math.prod(k_sizes), []
    for size in reversed(k_sizes):
        within = math.gcd(left, size)
        sizes.append(size // max(within, 1))
        left //= max(within, 1)
    return tuple(reversed(sizes))


def _is_explicit(x: jax.Array) -> bool:
    sharding = getattr(jax.typeof(x), "sharding", None)
    return sharding is not None and any(part is not None for part in sharding.spec)
