"""Convolutions with a window, by a kernel that takes the packed parameter."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn
from interception_core import get_op
from quant_numerics import Convolution

from .matmul import NOTHING, Added, Between, NoKernel, Product, check_activations
from .phases import Axis, Phases, axis_of, interleaved, phases_of


@dataclasses.dataclass(frozen=True)
class Window:
    """How a convolution is one of images [images, *sizes, channels]. Hashable.

    Attributes:
        images: the axes of the activation, in that order.
        rows: the axes of the weight that make K: those of the window, then input channels.
        columns: the axis of the weight that has output channels.
        result: for each axis of the convolution's result, its place in [images, *sizes, channels].
        strides: of windows, like the others one for each axis of sizes.
        padding: before and after each axis.
        dilation: of a window's elements.
        groups: of channels.
        steps: from place to place of the input, more than 1 if it is transposed.
    """

    images: tuple[int, ...]
    rows: tuple[int, ...]
    columns: int
    result: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    steps: tuple[int, ...]

    @property
    def options(self) -> dict[str, Any]:
        """Return what ops are told."""
        names = "strides", "padding", "dilation", "groups"
        return {name: getattr(self, name) for name in names}

    def phases(self, w_shape: Sequence[int]) -> Phases | None:
        """Return how a weight of a shape is packed in phases; None if there is one."""
        each = zip(self.sizes(w_shape), self.steps, self.dilation, strict=True)
        counts = tuple(phases_of(*one) for one in each)
        if math.prod(counts) == 1:
            return None
        return Phases(counts, 1 if self._is_depthwise(w_shape) else self.groups)

    def _is_depthwise(self, w_shape: Sequence[int]) -> bool:
        return w_shape[self.rows[-1]] == 1 and w_shape[self.columns] == self.groups > 1

    def _copies(self, w_shape: Sequence[int]) -> int:
        """Return how many times the convolution of all phases has the channels of the input."""
        phases = self.phases(w_shape)
        if phases is None or not self._is_depthwise(w_shape):
            return 1
        return math.prod(phases.counts)

    def of_phases(
        self, x_shape: Sequence[int], w_shape: Sequence[int]
    ) -> tuple[Window, list[Axis]]:
        """Return the convolution of all phases of a transposed one, and its axes.

        Its input has the channels of a depthwise convolution once for each phase.

        Args:
            x_shape: [images, *sizes, channels] of the input.
            w_shape: of the weight.
        """
        sizes, phases = self.sizes(w_shape), self.phases(w_shape)
        counts = (1,) * len(sizes) if phases is None else phases.counts
        given = x_shape[1:-1], sizes, self.steps, self.dilation, self.padding, counts
        axes = [axis_of(*one) for one in zip(*given, strict=True)]
        window = dataclasses.replace(
            self,
            padding=tuple(axis.padding for axis in axes),
            dilation=tuple(axis.dilation for axis in axes),
            groups=self.groups * self._copies(w_shape),
            steps=(1,) * len(sizes),
        )
        return window, axes

    def of_stored(self, places: Mapping[int, int]) -> Window:
        """Return it for a weight whose axes are at these places of what is stored."""
        rows = tuple(places[axis] for axis in self.rows)
        return dataclasses.replace(self, rows=rows, columns=places[self.columns])

    def sizes(self, w_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the window for the shape of the weight."""
        return tuple(w_shape[axis] for axis in self.rows[:-1])

    def asked(self, x: Any, w_shape: Sequence[int]) -> tuple[tuple[Any, Any], dict[str, int]]:
        """Return the operands and parameters that kernels are asked about."""
        images = tuple(x.shape[axis] for axis in self.images)
        rows, n = tuple(w_shape[axis] for axis in self.rows), w_shape[self.columns]
        copies, phases = self._copies(w_shape), self.phases(w_shape)
        if phases is not None:
            images = (*images[:-1], images[-1] * copies)
            rows, n = phases.rows(rows), phases.matrix(rows, n)[1]
        asked = jax.ShapeDtypeStruct(images, x.dtype), jax.ShapeDtypeStruct((*rows, n), jnp.int8)
        return asked, {"groups": self.groups * copies}


def window_of(
    contraction: Convolution, side: int, x_shape: Sequence[int], w_shape: Sequence[int]
) -> Window:
    """Return how a convolution with a weight at ``side`` is read, or raise NoKernel."""
    if side != 1:
        raise NoKernel("the input of a convolution")
    if contraction.out_sharding is not None:
        raise NoKernel("out_sharding is given")
    if contraction.batch_group_count > 1:
        raise NoKernel("a convolution with groups of images")
    numbers = contraction.numbers
    batch, feature, *places = numbers.lhs_spec
    steps = tuple(contraction.lhs_dilation or (1 for _ in places))
    if any(step > 1 for step in steps) and any(stride > 1 for stride in contraction.window_strides):
        raise NoKernel("a transposed convolution that leaves results out")
    out, features, *window = numbers.rhs_spec
    dilation = tuple(contraction.rhs_dilation or (1 for _ in places))
    padding = contraction.padding
    if isinstance(padding, str):
        reach = [(w_shape[a] - 1) * step + 1 for a, step in zip(window, dilation, strict=True)]
        # As lax, which pads the input with the zeros between its places. A size may be a symbol.
        apart = zip((x_shape[axis] for axis in places), steps, strict=True)
        sizes = [size if step == 1 or size == 0 else (size - 1) * step + 1 for size, step in apart]
        padding = lax.padtype_to_pads(sizes, reach, contraction.window_strides, padding)
    # The result's axes in the order of its spec are images, channels and sizes.
    in_order = [0, len(places) + 1, *range(1, len(places) + 1)]
    became = dict(zip(numbers.out_spec, in_order, strict=True))
    return Window(
        (batch, *places, feature),
        (*window, features),
        out,
        tuple(became[axis] for axis in range(len(in_order))),
        tuple(contraction.window_strides),
        tuple((int(low), int(high)) for low, high in padding),
        dilation,
        contraction.feature_group_count,
        steps,
    )


def conv_op_of(how: qn.HowToQuantize | None, is_static: bool, packed: Any) -> str:
    """Return the op for a convolution with a weight that is packed, or raise NoKernel."""
    if how is None:
        op = getattr(packed, "float_conv_op", None)
        if op is None:
            raise NoKernel("a convolution of float activations")
        return op
    check_activations(how, is_static, "image")
    op = getattr(packed, "conv_op", None)
    if op is None:
        raise NoKernel("its package has no convolutions")
    return op


def convolve(asked: Product, added: Added, between: Between) -> jax.Array:
    """Return a convolution by a kernel's op, or raise NoKernel.

    Results are int8 if ``between`` has a scale for them.
    """
    contraction, how, scale, x, weight, side, dtype = asked
    window = window_of(contraction, side, x.shape, weight.shape)
    if weight.gone:
        raise NoKernel("a convolution whose output channels a program maps")
    rank = len(weight.k_sizes)
    order = [weight.order.index(part) for part in range(rank)]
    if tuple(order) != window.rows or weight.group or weight.phases != window.phases(weight.shape):
        raise NoKernel("its weight was packed for another operation")
    if not all(isinstance(x.shape[axis], int) for axis in window.images[1:]):
        raise NoKernel("a size that is a symbol")
    op = conv_op_of(how, scale is not None, weight.packed)
    stacked = weight.gathered()
    options = {} if scale is None else {"x_scale": scale}
    if between.quantized is not None and scale is not None:
        x = between.quantized
    # What is added has the axes of the result, in their order; bounds have none.
    adds = window.result == tuple(range(x.ndim)) or (added.bias is None and added.residual is None)
    if between.y_scale is not None:
        clamps = added.clamp is None or getattr(weight.packed, "clamps", False)
        if not adds or not clamps or weight.misses:
            raise NoKernel("something is done to its results that a kernel doesn't do")
        options |= {"y_scale": between.y_scale}
    call = functools.partial(get_op(op), out_dtype=dtype, **options)
    inside, after = (added, NOTHING) if adds else (NOTHING, added)
    images = x.transpose(window.images)
    if max(window.steps) > 1:
        y, after = _transposed(window, call, images, stacked, inside, after, dtype, between)
    else:
        y = call(
            images,
            stacked.packed,
            window.sizes(weight.shape),
            **window.options,
            **inside.options(weight.packed),
        )
        after = inside.rest(weight.packed) if adds else after
    if weight.misses:
        y = jnp.where(weight.index < 0, jnp.asarray(jnp.nan, y.dtype), y)
    y = y.transpose(window.result)
    return y if between.y_scale is not None else after.to(y)


def _transposed(
    window: Window,
    call: Callable[..., jax.Array],
    images: jax.Array,
    weight: Any,
    inside: Added,
    after: Added,
    dtype: np.dtype,
    between: Between,
) -> tuple[jax.Array, Added]:
    """Return a transposed convolution by an op for ordinary ones, and what is still to be done.

    ``inside`` is what a kernel may do to its results: all but a residual, whose numbers would have
    to be in the order of phases.
    """
    one, axes = window.of_phases(images.shape, weight.shape)
    phases = weight.phases or Phases((1,) * len(axes), 1)
    if inside.residual is not None:
        if between.y_scale is not None:
            raise NoKernel("a residual of a transposed convolution is added to floats")
        after = dataclasses.replace(inside, bias=None)
        inside = Added(bias=inside.bias)
    has_empty = any(place is None for axis in axes for place in axis.places)
    if has_empty and between.y_scale is not None:
        raise NoKernel("some results of a transposed convolution are their bias, a float")
    empty = inside.to(jnp.zeros(math.prod(weight.n_sizes), dtype)) if has_empty else None
    bias = None if inside.bias is None else phases.columns(inside.bias)
    given = dataclasses.replace(inside, bias=bias)
    copies = one.groups // window.groups
    if copies > 1:  # depthwise: each phase has the channels
        images = jnp.concatenate([images] * copies, -1)
    sums = call(
        images,
        weight.packed,
        phases.rows([weight.shape[axis] for axis in window.rows])[:-1],
        **one.options,
        **given.options(weight.packed),
    )
    sums = given.rest(weight.packed).to(sums)
    return interleaved(sums, phases, axes, empty), after
