"""Matmuls by a kernel that takes the packed parameter, and what kernels do to a result.

A kernel adds a bias, a residual, or both. A batch's rows are rows to it, and mapped columns are
columns: programs with named axes map a weight over the axes that are not contracted, so that what
they multiply is a vector, and a kernel multiplies with the whole weight all the same, once.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

import quant_numerics as qn
from interception_core import get_op
from quant_numerics import Contraction, Convolution, Matmul, RaggedMatmul

from ..program.matching import tile_elements

_FLOATS = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


class NoKernel(Exception):
    """Raised for a contraction that kernels don't compute, with the reason."""


class Clamp(NamedTuple):
    """Numbers between which results are cut.

    Attributes:
        least: the least result.
        most: the largest.
        is_open: whether the derivative at a bound is 0, as that of ``lax.clamp`` and ``relu``; else
            it is that of a maximum and a minimum.
    """

    least: float
    most: float
    is_open: bool

    def of(self, y: jax.Array) -> jax.Array:
        """Return results that are cut."""
        least, most = (jnp.asarray(bound, y.dtype) for bound in self[:2])
        return (
            lax.clamp(least, y, most) if self.is_open else jnp.minimum(jnp.maximum(y, least), most)
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Added:
    """What is done to a contraction's result, each sum rounded to the result's dtype.

    Attributes:
        bias: [n], added, repeated along all axes but the last; None for none.
        residual: of the result's shape, added after the bias; None for none.
        clamp: how results are cut in the end; None: they aren't (static).
    """

    bias: Any = None
    residual: Any = None
    clamp: Clamp | None = dataclasses.field(default=None, metadata={"static": True})

    def to(self, y: jax.Array) -> jax.Array:
        """Return the result."""
        if self.bias is not None:
            y = y + jnp.expand_dims(self.bias, range(y.ndim - 1))
        y = y if self.residual is None else y + self.residual
        return y if self.clamp is None else self.clamp.of(y)

    def options(self, packed: Any) -> dict[str, Any]:
        """Return what there is, by the name that the ops of a packed weight have for it."""
        arrays = {"bias": self.bias, "residual": self.residual}
        found = {name: array for name, array in arrays.items() if array is not None}
        if self.clamp is not None and getattr(packed, "clamps", False):
            found["clamp"] = self.clamp[:2]
        return found

    def rest(self, packed: Any) -> Added:
        """Return what the ops of a packed weight, given ``options``, don't do."""
        return NOTHING if getattr(packed, "clamps", False) else Added(clamp=self.clamp)

    def in_batch(
        self, is_mapped: Added, size: int, kept: Sequence[int]
    ) -> tuple[Added, tuple[jax.Array, ...]]:
        """Return what a kernel adds to the results of a batch, and what is added after it.

        A bias that the batch shares is added to all rows. A mapped one, whose first axis is the
        batch's, differs from row to row, as a residual does. ``kept`` are the axes of one result,
        but for the last.
        """
        bias, residuals = self.bias, [] if self.residual is None else [self.residual]
        if bias is not None and is_mapped.bias:
            row = bias.reshape(size, *(1 for _ in kept), bias.shape[-1])
            bias, residuals = None, [row, *residuals]
        whole = [jnp.broadcast_to(x, (size, *kept, x.shape[-1])) for x in residuals]
        inside, after = Added(bias, whole[0] if whole else None), tuple(whole[1:])
        return inside if after else dataclasses.replace(inside, clamp=self.clamp), after


NOTHING = Added()

Run = Callable[[jax.Array, Any, Added], jax.Array]
"""Multiplies [*rows, K] with a packed weight, and adds to the product, to [*rows, N]."""


def mapped_contraction(run: Run, n_sizes: Sequence[int], gone: Sequence[int]) -> Callable[..., Any]:
    """Return a contraction with some packed columns, with a ``vmap`` rule.

    ``run`` multiplies with all of them; of the axes in ``gone`` one index is taken, and a ``vmap``
    over all indices of one takes them in their order. The function is of x [*rows, K], the packed
    weight, what is added to [*rows, N], and an int32 index for each axis in ``gone``.
    """

    def one(x: jax.Array, weight: Any, added: Added, places: Sequence[jax.Array]) -> jax.Array:
        y = run(x, weight, added).reshape(*x.shape[:-1], *n_sizes)
        for part, place in sorted(zip(gone, places, strict=True), key=lambda pair: -pair[0]):
            y = lax.dynamic_index_in_dim(y, place, x.ndim - 1 + part, keepdims=False)
        return y

    wrapped = custom_vmap(one)

    def rule(
        size: int, in_batched: Any, x: jax.Array, weight: Any, added: Added, places: Any
    ) -> Any:
        is_rows, of_weight, of_added, of_places = in_batched
        mapped = [i for i, is_mapped in enumerate(of_places) if is_mapped]
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, in_batched)
        if not any(jax.tree.leaves(of_weight)):
            if not mapped and not is_rows:  # only what is added differs: multiply once
                y = wrapped(x, weight, NOTHING, places)
                return jax.vmap(lambda added: added.to(y), axes[2:3], axis_size=size)(added), True
            if not mapped:
                inside, after = added.in_batch(of_added, size, x.shape[1:-1])
                y = sum(after, wrapped(x, weight, inside, places))
                return Added(clamp=added.clamp if after else None).to(y), True
            first, *others = mapped
            part = gone[first]
            # A map over all columns of an axis is that axis of one call's result.
            if not others and not is_rows and size == n_sizes[part]:
                rest = [i for i in range(len(gone)) if i != first]
                left = [gone[i] for i in rest]
                run_all = mapped_contraction(run, n_sizes, left)
                y = run_all(x, weight, added, [places[i] for i in rest])
                axis = x.ndim - 1 + part - sum(other < part for other in left)
                return jnp.moveaxis(y, axis, 0), True
        return jax.vmap(one, tuple(axes), axis_size=size)(x, weight, added, places), True

    wrapped.def_vmap(rule)
    return wrapped


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Between:
    """What a contraction has of its neighbours in a chain of int8 values.

    Attributes:
        quantized: its activation as int8, in its static range, as the contraction before gives it;
            None where it quantizes the activation.
        y_scale: float32[], the scale of int8 results, which the contraction after it reads; None
            for float results.
    """

    quantized: Any = None
    y_scale: Any = None


ALONE = Between()


class Rotation(NamedTuple):
    """How activations are rotated: signs, then Hadamard matrices of blocks.

    Attributes:
        signs: int8 [K], 1 or -1.
        block: numbers of a block, a power of two.
        axes: the axes of the weight that make K, in that order.
    """

    signs: jax.Array
    block: int
    axes: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Layout:
    """How a contraction of activation and weight is a matmul.

    A pointwise convolution is one, too. Its activation is read at some places, and an axis of size
    1 is appended for each axis of the window: the axes below are those of what is read.

    Attributes:
        kept: the axes of the activation that the result has.
        pairs: each contracted axis of the weight, with that of the activation.
        result: for each axis of the contraction's result, its place in that of the matmul, which
            has the axes of the activation first, then those of the weight in their order.
        strides: of a convolution, how far apart the places are along each axis of the activation;
            None for a matmul, which reads the activation as it is.
    """

    kept: tuple[int, ...]
    pairs: tuple[tuple[int, int], ...]
    result: tuple[int, ...]
    strides: tuple[int, ...] | None = None

    def sizes(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        """Return the shape of an activation as it is read."""
        if self.strides is None:
            return tuple(shape)
        # Of an axis that is read whole the size may be a symbol.
        read = (
            n if step == 1 else -(-n // step) for n, step in zip(shape, self.strides, strict=True)
        )
        return (*read, *(1 for _ in range(len(self.pairs) - 1)))

    def read(self, x: jax.Array) -> jax.Array:
        """Return an activation as it is read."""
        if self.strides is None:
            return x
        if math.prod(self.strides) > 1:
            x = lax.slice(x, [0] * x.ndim, x.shape, self.strides)
        return jnp.expand_dims(x, range(x.ndim, x.ndim + len(self.pairs) - 1))


def layout_of(
    contraction: Contraction, side: int, x_shape: Sequence[int], w_shape: Sequence[int]
) -> Layout:
    """Return how a contraction with a weight at ``side`` is one of matrices, or raise NoKernel."""
    if isinstance(contraction, Convolution):
        return _pointwise_layout(contraction, side, w_shape)
    if not isinstance(contraction, Matmul):
        raise NoKernel("not a plain matmul")
    if contraction.out_sharding is not None:
        raise NoKernel("out_sharding is given")
    contracted, batch = contraction.dims
    if batch[0]:
        raise NoKernel("it has batch axes")
    w_axes, x_axes = contracted[side], contracted[1 - side]
    if not w_axes:
        raise NoKernel("it contracts nothing")
    if any(w_shape[a] != x_shape[b] for a, b in zip(w_axes, x_axes, strict=True)):
        raise NoKernel("an axis of size 1 is broadcast")
    kept = tuple(axis for axis in range(len(x_shape)) if axis not in x_axes)
    columns = [axis for axis in range(len(w_shape)) if axis not in w_axes]
    ours = [(1 - side, axis) for axis in kept] + [(side, axis) for axis in columns]
    shapes = (w_shape, x_shape) if side == 0 else (x_shape, w_shape)
    *labels, out = contraction.labels(*map(len, shapes))
    theirs = sorted(ours, key=lambda place: out.index(labels[place[0]][place[1]]))
    pairs = tuple(zip(w_axes, x_axes, strict=True))
    return Layout(kept, pairs, tuple(ours.index(place) for place in theirs))


def _pointwise_layout(contraction: Convolution, side: int, w_shape: Sequence[int]) -> Layout:
    """Return how a convolution is read as a matmul over its input features."""
    if side != 1:
        raise NoKernel("the input of a convolution")
    if not contraction.is_pointwise(w_shape):
        raise NoKernel("not a matmul")
    numbers = contraction.numbers
    batch, feature, *places = numbers.lhs_spec
    ndim, (_, features, *window) = len(numbers.lhs_spec), numbers.rhs_spec
    kept = tuple(axis for axis in range(ndim) if axis != feature)
    pairs = ((features, feature), *((axis, ndim + i) for i, axis in enumerate(window)))
    became = dict(zip(numbers.out_spec, (batch, feature, *places), strict=True))
    result = (
        len(kept) if became[axis] == feature else kept.index(became[axis]) for axis in range(ndim)
    )
    strides = dict(zip(places, contraction.window_strides, strict=True))
    return Layout(kept, pairs, tuple(result), tuple(strides.get(axis, 1) for axis in range(ndim)))


def check_activations(how: qn.HowToQuantize, is_static: bool, part: str) -> None:
    """Raise NoKernel unless kernels quantize activations so, each ``part`` of them apart."""
    if how.qtype != "int8":
        raise NoKernel(f"activations in {how.qtype}")
    if is_static:
        if not qn.parse_calibration_method(how.method).is_symmetric:
            raise NoKernel("activations with a static range that has a zero point")
    elif how.method != "absmax" or not how.channelwise:
        raise NoKernel(f"activations with another range than the largest of each {part}")


def op_of(
    how: qn.HowToQuantize | None,
    is_static: bool,
    packed: Any,
    group: int,
    k_sizes: Sequence[int],
) -> str:
    """Return the op for a contraction with a packed weight, or raise NoKernel.

    ``group`` rows of the weight share a scale, 0 for all.
    """
    if how is None:
        return packed.matmul_op(quantizes=False)
    check_activations(how, is_static, "row")
    op = packed.matmul_op(quantizes=True)
    if op is None:
        raise NoKernel(f"int8 activations with weights of {packed.bits} bits")
    if is_static:  # one scale for all of it, whatever groups the weight has
        if not getattr(packed, "scales", False):
            raise NoKernel("activations with a static range")
        return op
    k = math.prod(k_sizes)
    tile = 0 if how.tile_size is None else tile_elements(how.tile_size, k)
    if (0 if tile == k else tile) != group:
        raise NoKernel("activations and weights in different tiles")
    return op


def check_groups(contraction: RaggedMatmul, side: int) -> None:
    """Raise NoKernel unless a ragged matmul is ``lax.ragged_dot`` with a weight."""
    if side != 1 or not contraction.trains:
        raise NoKernel("a ragged matmul of other axes than those of ragged_dot")


def check_dtypes(contraction: Contraction, x: Any, dtype: Any) -> np.dtype:
    """Return the result's dtype for the dtypes of activation and weight.

    Raises:
        NoKernel: kernels don't have one of the dtypes.
    """
    out = contraction.preferred_element_type
    if out is None:
        out = x.dtype if x.dtype == dtype else jnp.float32
    for found in (x.dtype, dtype, out):
        if jnp.dtype(found) not in _FLOATS:
            raise NoKernel(f"{jnp.dtype(found).name} numbers")
    return jnp.dtype(out)


class Product(NamedTuple):
    """What a kernel is asked for: a contraction of a packed weight.

    Attributes:
        contraction: what to compute.
        how: how the activation is quantized; None if it stays float.
        scale: its static scale; None if it has none.
        x: the activation, float.
        weight: the ``PrepackedWeight``.
        side: which operand that is.
        dtype: of the result.
    """

    contraction: Any
    how: qn.HowToQuantize | None
    scale: jax.Array | None
    x: jax.Array
    weight: Any
    side: int
    dtype: np.dtype


def multiply(asked: Product, rotation: Rotation | None, added: Added) -> jax.Array:
    """Return a contraction, read as a matmul, or raise NoKernel."""
    contraction, how, scale, x, weight, side, dtype = asked
    layout = layout_of(contraction, side, x.shape, weight.shape)
    rank = len(weight.k_sizes)
    places = {part: axis for axis, part in enumerate(weight.order)}
    if {axis for axis, _ in layout.pairs} != {places[part] for part in range(rank)}:
        raise NoKernel("other axes are contracted than it was packed for")
    x = layout.read(x)
    kept = [x.shape[axis] for axis in layout.kept]

    # These raise if there is no op, before anything is computed.
    op = op_of(how, scale is not None, weight.packed, weight.group, weight.k_sizes)
    if rotation is not None:
        _check_rotation(rotation, weight)
    pairs = dict(layout.pairs)
    contracted = [pairs[places[part]] for part in range(rank)]
    rows = x.transpose(*layout.kept, *contracted).reshape(*kept, math.prod(weight.k_sizes))

    def run(rows: jax.Array, stored: Any, added: Added) -> jax.Array:
        packed, options = stored
        given = options | added.options(packed)
        y = get_op(op)(rows, packed, out_dtype=dtype, **given, **static)
        return added.rest(packed).to(y)

    options, static = {"index": weight.index}, {}
    if rotation is not None:
        options, static = options | {"signs": rotation.signs}, {"rotation": rotation.block}
    if scale is not None:
        options = options | {"x_scale": scale}
    adds = can_add(weight) and layout.result == tuple(range(len(kept) + 1))
    stored, inside = (weight.packed, options), added if adds else NOTHING
    y = mapped_contraction(run, weight.n_sizes, weight.gone)(rows, stored, inside, weight.places)
    if weight.misses:
        y = jnp.where(weight.index < 0, jnp.asarray(jnp.nan, y.dtype), y)
    left = [part for part in range(rank, rank + len(weight.n_sizes)) if part in places]
    columns = sorted(left, key=lambda part: places[part])
    order = [*range(len(kept)), *(len(kept) + left.index(part) for part in columns)]
    y = y.transpose([order[place] for place in layout.result])
    return y if adds else added.to(y)


def can_add(weight: Any) -> bool:
    """Return whether a kernel may add to the columns of a packed weight."""
    plain = len(weight.n_sizes) == 1 and not (weight.gone or weight.misses)
    return plain and getattr(weight.packed, "adds", False)


def _check_rotation(rotation: Rotation, weight: Any) -> None:
    """Raise NoKernel unless a weight was packed as it was rotated, for kernels that rotate rows."""
    if weight.platform not in getattr(weight.packed, "rotates", ()):
        raise NoKernel("its package has no rotations on its platform")
    places = [weight.order.index(part) for part in range(len(weight.k_sizes))]
    if tuple(places) != rotation.axes:
        raise NoKernel("it was packed in another order than it was rotated in")


def multiply_groups(asked: Product, sizes: jax.Array) -> jax.Array:
    """Return ``lax.ragged_dot`` with one packed weight per group of rows."""
    contraction, how, scale, x, weight, side, dtype = asked
    check_groups(contraction, side)
    if len(weight.lead) != 1 or weight.axes() != [0, 1, 2] or weight.order != (0, 1):
        raise NoKernel("groups along another axis than the first")
    if weight.misses or weight.gone or weight.pieces:
        raise NoKernel("groups that a program looks up or maps")
    op = op_of(how, scale is not None, weight.packed, weight.group, weight.k_sizes)
    options = {} if scale is None else {"x_scale": scale}
    options |= {"index": weight.index, "group_sizes": sizes}
    return get_op(op)(x, weight.packed, out_dtype=dtype, **options)
