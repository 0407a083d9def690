"""Products and convolutions as FULLY_CONNECTED and CONV_2D."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax


def conv_general_dilated(
    lhs: jax.Array,
    rhs: jax.Array,
    window_strides: Sequence[int],
    padding: Any,
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    **options: Any,
) -> jax.Array:
    """Returns ``jax.lax.conv_general_dilated``, its input dilated before it.

    The converter gets a transposed convolution wrong, or makes it float. With zeros between the
    input's values it is a plain one.
    """
    # Padding by name is not that of the dilated input: lax says what to give instead.
    if lhs_dilation is not None and not isinstance(padding, str):
        numbers = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
        for axis, factor in zip(numbers.lhs_spec[2:], lhs_dilation, strict=True):
            lhs = dilate(lhs, axis, factor)
        lhs_dilation = None
    return lax.conv_general_dilated(
        lhs, rhs, window_strides, padding, lhs_dilation, rhs_dilation, dimension_numbers, **options
    )


def dilate(x: jax.Array, axis: int, factor: int) -> jax.Array:
    """Returns an array with zeros between its values along an axis."""
    if factor == 1:
        return x
    before, count, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    # Interior padding is float, padding at the end of an axis of its own is not.
    rows = x.reshape(int(np.prod(before)), count, 1, int(np.prod(after)))
    padded = jnp.pad(rows, ((0, 0), (0, 0), (0, factor - 1), (0, 0)))
    wide = padded.reshape(*before, count * factor, *after)
    return lax.slice_in_dim(wide, 0, (count - 1) * factor + 1, axis=axis)


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    **options: Any,
) -> jax.Array:
    """Returns ``jax.lax.dot_general``, its contracted axes in the same order in both operands.

    The converter takes them to be, and gives other numbers without an error where they are not.
    """
    (inner, theirs), batch = dimension_numbers
    pairs = sorted(zip(inner, theirs, strict=True))
    places = sorted(theirs)
    if [axis for _, axis in pairs] != places:
        order = list(range(rhs.ndim))
        for place, (_, axis) in zip(places, pairs, strict=True):
            order[place] = axis
        rhs = rhs.transpose(order)
    numbers = ((tuple(axis for axis, _ in pairs), tuple(places)), batch)
    return lax.dot_general(lhs, rhs, numbers, precision, preferred_element_type, **options)


def as_matrix(
    weight: jax.Array, contracting: Sequence[int]
) -> tuple[jax.Array, Callable[[jax.Array], jax.Array]]:
    """Returns the weight of a product as the matrix to quantize.

    A weight with several axes that are not contracted gets a scale per channel in its .tflite
    only if it is quantized as a matrix, and takes its shape after that.

    Args:
        weight: the weight.
        contracting: its axes that the product contracts.

    Returns:
        The matrix, whose axis 1 are the channels, in the order of the weight's axes that are not
        contracted, and what gives a matrix the weight's shape.

    Raises:
        ValueError: an axis that the weight does not have, or has twice.
    """
    inner = [axis % weight.ndim for axis in contracting if -weight.ndim <= axis < weight.ndim]
    if len(set(inner)) != len(contracting):
        raise ValueError(f"A weight of shape {weight.shape} has no axes {tuple(contracting)}.")
    free = [axis for axis in range(weight.ndim) if axis not in inner]
    order = [*sorted(inner), *free]
    moved = weight.transpose(order)
    size = int(np.prod([weight.shape[axis] for axis in free]))

    def restore(matrix: jax.Array) -> jax.Array:
        return matrix.reshape(moved.shape).transpose(np.argsort(order))

    return moved.reshape(-1, size), restore


def unsplat(constant: Any) -> np.ndarray:
    """Returns a bias or weight for a product whose weight has a scale per channel.

    The converter keeps an array of one value as that value. It quantizes it with the scale of
    the first channel and takes the result for all of them. So one value becomes the next float;
    zeros are right as they are.

    Args:
        constant: the bias or weight.
    """
    array = np.array(constant)
    if array.size > 1 and array.flat[0] and np.all(array == array.flat[0]):
        array.flat[0] = np.nextafter(array.flat[0], array.dtype.type(0))
    return array
