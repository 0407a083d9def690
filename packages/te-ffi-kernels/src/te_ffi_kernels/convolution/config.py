"""Form: static options of convolutions with packed weights, and checks."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .. import checks
from ..packed_weights.config import check_added, check_clamp, check_scale, clamp_attributes
from ..packed_weights.layout import Layout
from ..packed_weights.weight import PackedWeight

_DIMS = 3
"""Axes of an image, to the kernel."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A convolution of images [images, *sizes, channels]. Hashable.

    Attributes:
        op: name of the op.
        layout: layout of the weight.
        n: output channels.
        dtype: dtype of the result, and what it is rounded to before it becomes int8.
        window: elements of the window along each axis of an image.
        strides: of windows.
        padding: zeros before and after each axis; negative: what is cut off.
        dilation: of a window's elements.
        groups: of channels.
        clamp: between which results are cut, or None.
        has_scale: whether x has a scale that is given; an operand after the weight.
        to_int8: whether results become int8, by a scale that is an operand after that of x.
        has_bias: whether a bias [n] is added; an operand after these.
        has_residual: whether an array as large as the result is added then: the last operand.
        quantizes: whether images are quantized to int8, and do not stay floats.
    """

    op: str
    layout: Layout
    n: int
    dtype: Any
    window: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int = 1
    clamp: tuple[float, float] | None = None
    has_scale: bool = False
    to_int8: bool = False
    has_bias: bool = False
    has_residual: bool = False
    quantizes: bool = True

    def plain(self) -> Form:
        """Return the form of the product alone, as floats."""
        nothing = {"to_int8": False, "has_bias": False, "has_residual": False}
        return dataclasses.replace(self, clamp=None, **nothing)

    @property
    def result_dtype(self) -> Any:
        """Return the dtype of the array that the op returns."""
        return jnp.dtype(jnp.int8) if self.to_int8 else self.dtype

    def parted(self, given: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the operands after x, and those of them that are added."""
        count = len(given) - self.has_bias - self.has_residual
        return given[:count], given[count:]

    def of_plain(self, given: Sequence[Any]) -> Sequence[Any]:
        """Return those operands after x that ``plain`` has, without what is added."""
        return given[:-1] if self.to_int8 else given

    def sizes(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of a result for those of an image.

        Raises:
            ValueError: the window is larger than an image with its padding.
        """
        return tuple(
            max(0, (size + low + high - (window - 1) * step - 1) // stride + 1)
            for size, (low, high), window, step, stride in zip(
                shape, self.padding, self.window, self.dilation, self.strides, strict=True
            )
        )

    def shape(self, x: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of a result for that of x."""
        return (x[0], *self.sizes(x[1:-1]), self.n)

    @property
    def attributes(self) -> dict[str, Any]:
        """Return what kernels are told, and asked about."""
        lacks = (1,) * (_DIMS - len(self.window))
        numbers = {
            "window": (*lacks, *self.window),
            "stride": (*lacks, *self.strides),
            "dilation": (*lacks, *self.dilation),
            "low": (*(0 for _ in lacks), *(low for low, _ in self.padding)),
        }
        told: dict[str, Any] = {
            f"{name}_{i}": n for name, found in numbers.items() for i, n in enumerate(found)
        }
        told |= {"k": self.layout.k, "n": self.n, **self.layout.attributes, "groups": self.groups}
        told |= {"x_scale": 1} if self.has_scale else {}
        told |= (
            {"int8_of": 1 + list(map(jnp.dtype, checks.FLOATS)).index(self.dtype)}
            if self.to_int8
            else {}
        )
        told |= {"bias": int(self.has_bias), "residual": int(self.has_residual)}
        return told | clamp_attributes(self.clamp)

    def kernel(self, weight: PackedWeight) -> tuple[jax.Array, jax.Array]:
        """Return values int8[*window, channels of a group, n] and scales float32[n]."""
        qvalue, scale = weight.unpack()
        qvalue = qvalue.reshape(*self.window, -1, self.n)
        return qvalue, scale.astype(jnp.float32).reshape(self.n)

    def run(self, x: jax.Array, kernel: jax.Array, **options: Any) -> jax.Array:
        """Convolve arrays as ``lax.conv_general_dilated``."""
        places = "DHW"[_DIMS - len(self.window) :]
        return lax.conv_general_dilated(
            x,
            kernel,
            self.strides,
            self.padding,
            rhs_dilation=self.dilation,
            dimension_numbers=(f"N{places}C", f"{places}IO", f"N{places}C"),
            feature_group_count=self.groups,
            **options,
        )


def form(
    op: str,
    bits: int,
    x: jax.Array,
    weight: PackedWeight,
    window: Sequence[int],
    strides: Sequence[int] | None,
    padding: str | Sequence[tuple[int, int]],
    dilation: Sequence[int] | None,
    groups: int,
    out_dtype: DTypeLike | None,
    x_scale: ArrayLike | None,
    y_scale: ArrayLike | None,
    bias: jax.Array | None,
    residual: jax.Array | None,
    clamp: tuple[float, float] | None,
    quantizes: bool = True,
) -> Form:
    """Return the form of a convolution, its arguments checked.

    Raises:
        TypeError, ValueError: as ``conv_w8a8``.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"{op}: weight must be a PackedWeight, got {type(weight).__name__}. Pack it "
            f"once with pack_w{bits}(qvalue, scale)."
        )
    if weight.bits != bits or weight.group or len(weight.shape) != 2:
        raise ValueError(
            f"{op}: weight must be a matrix packed in {bits} bits with one scale per column, got "
            f"shape {weight.shape}, {weight.bits} bits and groups of {weight.group} rows"
        )
    try:
        weight.check()
    except ValueError as error:
        raise ValueError(f"{op}: weight: {error}") from None
    dims = x.ndim - 2
    if not 1 <= dims <= _DIMS:
        raise ValueError(
            f"{op}: x must be [images, *sizes, channels] with 1 to {_DIMS} axes of sizes, got "
            f"shape {x.shape}"
        )
    is_int8 = x.dtype == jnp.int8 and x_scale is not None
    checks.dtype(op, "x", x.dtype, (jnp.dtype(jnp.int8),) if is_int8 else checks.FLOATS)
    default = jnp.float32 if is_int8 else x.dtype
    dtype = checks.dtype(
        op, "out_dtype", default if out_dtype is None else out_dtype, checks.FLOATS
    )
    windows = _numbers(op, "window", window, dims)
    steps = _numbers(op, "strides", strides, dims)
    apart = _numbers(op, "dilation", dilation, dims)
    channels = x.shape[-1]
    if groups < 1 or channels % groups or weight.n % groups:
        raise ValueError(
            f"{op}: groups must divide the {channels} channels of x and the {weight.n} columns of "
            f"the weight, got {groups}"
        )
    k = math.prod(windows) * (channels // groups)
    if weight.k != k:
        raise ValueError(
            f"{op}: the weight must have {k} rows, for a window of {windows} and "
            f"{channels // groups} channels, got {weight.k}"
        )
    if isinstance(padding, str):
        effective = [(n - 1) * step + 1 for n, step in zip(windows, apart, strict=True)]
        padding = lax.padtype_to_pads(x.shape[1:-1], effective, steps, padding)
    if len(padding) != dims or any(len(np.atleast_1d(pair)) != 2 for pair in padding):
        raise ValueError(
            f"{op}: padding must have two numbers for each of {dims} axes, got {padding}"
        )
    pads = tuple((int(low), int(high)) for low, high in padding)
    check_scale(op, True, x_scale)
    check_scale(op, True, y_scale, "y_scale")
    found = Form(op, weight.layout, weight.n, dtype, windows, steps, pads, apart, int(groups))
    result = jax.ShapeDtypeStruct(found.shape(x.shape), dtype)
    check_added(op, result, bias, residual, None, None)
    return dataclasses.replace(
        found,
        clamp=check_clamp(op, clamp),
        has_scale=x_scale is not None,
        to_int8=y_scale is not None,
        has_bias=bias is not None,
        has_residual=residual is not None,
        quantizes=quantizes,
    )


def _numbers(op: str, name: str, given: Sequence[int] | None, dims: int) -> tuple[int, ...]:
    """Return a whole number from 1 for each axis of an image."""
    found = (1,) * dims if given is None else tuple(map(int, given))
    if len(found) != dims or min(found) < 1:
        raise ValueError(
            f"{op}: {name} must be {dims} whole numbers from 1, one for each axis of sizes of x, "
            f"got {given}"
        )
    return found
