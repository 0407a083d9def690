"""Contractions and convolutions as FULLY_CONNECTED and CONV_2D."""

from __future__ import annotations

from collections.abc import Sequence
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
    """Return ``jax.lax.conv_general_dilated``, its input dilated before it.

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
    """Return an array with zeros between its values along an axis."""
    if factor == 1:
        return x
    before, count, after = x.shape[:axis], x.shape[axis], x.shape[axis + 1 :]
    # Interior padding is float, padding at the end of a separate axis is not.
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
    """Return ``jax.lax.dot_general``, its contracted axes in the same order in both operands.

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


def unsplat(constant: Any) -> np.ndarray:
    """Return a bias or weight that the converter scales by channel.

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
