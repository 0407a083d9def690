"""Convolutions with a window, by a kernel that takes the packed parameter."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn
from interception_core import get_op
from quant_numerics import Convolution

from .products import Added, Between, NoKernel


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
    """

    images: tuple[int, ...]
    rows: tuple[int, ...]
    columns: int
    result: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    @property
    def options(self) -> dict[str, Any]:
        """Return what ops are told."""
        names = "strides", "padding", "dilation", "groups"
        return {name: getattr(self, name) for name in names}

    def of_stored(self, places: Mapping[int, int]) -> Window:
        """Return it for a weight whose axes are at these places of what is stored."""
        rows = tuple(places[axis] for axis in self.rows)
        return dataclasses.replace(self, rows=rows, columns=places[self.columns])

    def sizes(self, w_shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the window for the shape of the weight."""
        return tuple(w_shape[axis] for axis in self.rows[:-1])

    def asked(self, x: Any, w_shape: Sequence[int]) -> tuple[tuple[Any, Any], dict[str, int]]:
        """Return the operands and parameters that kernels are asked about."""
        images = jax.ShapeDtypeStruct(tuple(x.shape[axis] for axis in self.images), x.dtype)
        kernel = tuple(w_shape[axis] for axis in (*self.rows, self.columns))
        return (images, jax.ShapeDtypeStruct(kernel, jnp.int8)), {"groups": self.groups}


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
    if any(step > 1 for step in contraction.lhs_dilation or ()):
        raise NoKernel("a transposed convolution")
    numbers = contraction.numbers
    batch, feature, *places = numbers.lhs_spec
    out, features, *window = numbers.rhs_spec
    dilation = tuple(contraction.rhs_dilation or (1 for _ in places))
    padding = contraction.padding
    if isinstance(padding, str):
        reach = [(w_shape[a] - 1) * step + 1 for a, step in zip(window, dilation, strict=True)]
        sizes = [x_shape[axis] for axis in places]
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
    )


def conv_op_of(how: qn.HowToQuantize | None, is_static: bool, packed: Any) -> str:
    """Return the op for a convolution with a weight that is packed, or raise NoKernel."""
    if how is None:
        raise NoKernel("a convolution of float activations")
    if how.qtype != "int8":
        raise NoKernel(f"activations in {how.qtype}")
    if is_static and not qn.parse_calibration_method(how.method).is_symmetric:
        raise NoKernel("activations with a static range that has a zero point")
    if not is_static and (how.method != "absmax" or not how.channelwise):
        raise NoKernel("activations with another range than the largest of each image")
    op = getattr(packed, "conv_op", None)
    if op is None:
        raise NoKernel("its package has no convolutions")
    return op


def convolve(
    contraction: Convolution,
    how: qn.HowToQuantize | None,
    scale: jax.Array | None,
    x: jax.Array,
    weight: Any,
    side: int,
    dtype: np.dtype,
    added: Added,
    between: Between,
) -> jax.Array:
    """Return a convolution with a ``PrepackedWeight``, by a kernel's op, or raise NoKernel.

    ``scale`` is the static scale of ``x``, None if it has none. Results are int8 if ``between`` has
    a scale for them.
    """
    window = window_of(contraction, side, x.shape, weight.shape)
    if weight.gone:
        raise NoKernel("a convolution whose output channels a program maps")
    rank = len(weight.k_sizes)
    order = [weight.order.index(part) for part in range(rank)]
    if tuple(order) != window.rows or weight.group:
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
    y = get_op(op)(
        x.transpose(window.images),
        stacked.packed,
        window.sizes(weight.shape),
        out_dtype=dtype,
        **window.options,
        **options,
        **(added.options(weight.packed) if adds else {}),
    )
    if weight.misses:
        y = jnp.where(weight.index < 0, jnp.asarray(jnp.nan, y.dtype), y)
    y = y.transpose(window.result)
    if between.y_scale is not None:
        return y
    return (added.rest(weight.packed) if adds else added).to(y)
