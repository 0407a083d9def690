"""Kernels: choose and call the op for a packed parameter's contraction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn
from interception_core import get_op
from quant_numerics import Contraction, Convolution, Matmul, RaggedMatmul

from ..program.granularity import tile_elements
from .convolution import convolve
from .products import (
    ALONE,
    NOTHING,
    Added,
    Between,
    NoKernel,
    check_activations,
    mapped_contraction,
)

_FLOATS = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


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


def product(
    contraction: Contraction,
    side: int,
    x: Any,
    weight: Any,
    *,
    how: qn.HowToQuantize | None,
    calibration: qn.Calibration | None,
    extras: Sequence[jax.Array],
    added: Added,
    rotation: Rotation | None = None,
    between: Between = ALONE,
) -> Any:
    """Return a contraction with a packed weight, or NotImplemented without a kernel for it.

    The arguments are those of ``StoredForm.contract``, a rotation of ``x``, and what a chain of
    convolutions has in int8.
    """
    if not isinstance(x, jax.Array) or _is_explicit(x):
        return NotImplemented
    symmetric = how is not None and calibration is not None and calibration.lower is None
    scale = qn.scale_of(calibration, how.qtype)[0].reshape(()) if symmetric else None  # type: ignore[arg-type, union-attr]
    has_zero_point = calibration is not None and scale is None
    given = contraction, how, scale, x, weight, side
    try:
        dtype = check_dtypes(contraction, x, weight.dtype)
        if isinstance(contraction, RaggedMatmul) and weight.phases is None:
            if between.y_scale is not None:
                return NotImplemented  # int8 results of rows in groups
            return added.to(_multiply_groups(*given, dtype, *extras))  # type: ignore[arg-type]
        if weight.lead or weight.pieces:
            return NotImplemented  # a stack, or packed in pieces for shard_map
        if isinstance(contraction, Convolution):
            is_matmul = contraction.is_pointwise(weight.shape)
            try:
                if (weight.windows or not is_matmul) and rotation is None and not has_zero_point:
                    return convolve(*given, dtype, added, between)  # type: ignore[arg-type]
            except NoKernel:  # of a program that the plan is not for
                if not is_matmul:
                    raise
        if weight.phases is not None:
            return NotImplemented  # packed for a transposed convolution
        if between.y_scale is not None:
            return NotImplemented  # int8 results of a matmul
        return _multiply(*given, dtype, rotation, added)
    except NoKernel:
        return NotImplemented


def _multiply(
    contraction: Contraction,
    how: qn.HowToQuantize | None,
    scale: jax.Array | None,
    x: jax.Array,
    weight: Any,
    side: int,
    dtype: np.dtype,
    rotation: Rotation | None,
    added: Added,
) -> jax.Array:
    """Return a contraction with a ``PrepackedWeight``, read as a matmul, or raise NoKernel.

    ``x`` is a float activation, quantized by ``how`` if given, by a static ``scale`` if given.
    """
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


def _multiply_groups(
    contraction: RaggedMatmul,
    how: qn.HowToQuantize | None,
    scale: jax.Array | None,
    x: jax.Array,
    weight: Any,
    side: int,
    dtype: np.dtype,
    sizes: jax.Array,
) -> jax.Array:
    """Return ``lax.ragged_dot`` with one packed weight per group of rows."""
    check_groups(contraction, side)
    if len(weight.lead) != 1 or weight.axes() != [0, 1, 2] or weight.order != (0, 1):
        raise NoKernel("groups along another axis than the first")
    if weight.misses or weight.gone or weight.pieces:
        raise NoKernel("groups that a program looks up or maps")
    op = op_of(how, scale is not None, weight.packed, weight.group, weight.k_sizes)
    options = {} if scale is None else {"x_scale": scale}
    options |= {"index": weight.index, "group_sizes": sizes}
    return get_op(op)(x, weight.packed, out_dtype=dtype, **options)


def _is_explicit(x: jax.Array) -> bool:
    sharding = getattr(jax.typeof(x), "sharding", None)
    return sharding is not None and any(part is not None for part in sharding.spec)
