"""Convolutions on CPU, where XLA has slow ones: of integers, and of small groups.

XLA's CPU backend computes a depthwise convolution in a plain loop. One elementwise program for all
products is 5 to 25 times as fast: see docs/benchmarks/quant-numerics.md. The gradient of its kernel
is a convolution of few places with a large window: a sum of products for each place.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

FLOAT32_EXACT = 2**24
"""All integers up to this are float32 numbers."""
_MOST_PARTS = 16


def int_conv(
    conv: Callable[[jax.Array, jax.Array], jax.Array],
    float_conv: Callable[[jax.Array, jax.Array], jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    feature_axes: tuple[int, int] | None,
    terms: tuple[int, int],
    largest: int,
) -> jax.Array:
    """Convolve integers whose sums fit in int32, with a float32 result.

    XLA's CPU backend computes integer convolutions in a plain loop, ten to twenty times slower than
    float32 ones. For programs lowered for CPU, sums of so few products that float32 holds them
    exactly are taken in float32: of all input features, or of parts of them that are added in
    int32. The result is the same, bit for bit. A sum goes over `terms`: so many window elements,
    and input features.
    """

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        return conv(a, b).astype(jnp.float32)

    window, features = terms
    step = FLOAT32_EXACT // (largest * max(window, 1))
    if step < features and (feature_axes is None or step * _MOST_PARTS < features):
        return plain(lhs, rhs)

    def in_floats(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if step >= features:
            return float_conv(a, b)
        assert feature_axes is not None
        total = None
        for start in range(0, features, step):
            stop = min(start + step, features)
            part = float_conv(
                lax.slice_in_dim(a, start, stop, axis=feature_axes[0]),
                lax.slice_in_dim(b, start, stop, axis=feature_axes[1]),
            ).astype(jnp.int32)
            total = part if total is None else total + part
        assert total is not None
        return total.astype(jnp.float32)

    return lax.platform_dependent(lhs, rhs, cpu=in_floats, default=plain)


_MOST_PRODUCTS = 64
"""Products of an output, or places of the result, up to which they are written out."""
_MOST_FEATURES = 4
"""Input features of a group up to which this was measured to be faster."""
_MOST_OUTPUTS = 8
"""Output features of a group up to which it was."""


def products_of_small_groups(
    lhs_shape: Sequence[Any],
    kernel_shape: Sequence[Any],
    result_shape: Sequence[int],
    *,
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    **_: Any,
) -> Callable[..., jax.Array] | None:
    """Return what computes a convolution of small groups on CPU; None where XLA is to."""
    numbers = dimension_numbers
    if (feature_group_count > 1) == (batch_group_count > 1):
        return None
    if batch_group_count > 1:  # the gradient of a kernel: a sum for each of a few places
        features = lhs_shape[numbers.lhs_spec[0]] // batch_group_count
        window = [result_shape[axis] for axis in numbers.out_spec[2:]]
        known, run = (*lhs_shape, *kernel_shape), sums_of_places
    else:
        features = kernel_shape[numbers.rhs_spec[1]]
        window = [kernel_shape[axis] for axis in numbers.rhs_spec[2:]]
        # A window's places are not known where an image has a symbolic size.
        known, run = [lhs_shape[axis] for axis in numbers.lhs_spec[1:]], shifted_products
    if not all(isinstance(size, int) for size in known):
        return None
    outputs = kernel_shape[numbers.rhs_spec[0]] // (feature_group_count * batch_group_count)
    is_small = features <= _MOST_FEATURES and outputs <= _MOST_OUTPUTS
    return run if is_small and 1 < features * math.prod(window) <= _MOST_PRODUCTS else None


def shifted_products(
    lhs: jax.Array,
    rhs: jax.Array,
    sums: np.dtype,
    *,
    window_strides: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    feature_group_count: int = 1,
    **others: Any,
) -> jax.Array:
    """Convolve like ``lax.conv_general_dilated``, without batch groups, in the dtype `sums`."""
    dn, groups = dimension_numbers, feature_group_count
    places = dn.lhs_spec[2:]
    kernel = lax.transpose(rhs, (*dn.rhs_spec[2:], *dn.rhs_spec[1::-1])).astype(sums)
    *window, features, outputs = kernel.shape
    lhs, apart, counts = _padded(lhs, places, window, window_strides, **others)
    # The feature axis becomes groups, and features of each; or groups, and outputs of each.
    along = dn.lhs_spec[1]

    def of_groups(x: jax.Array, each: int) -> jax.Array:
        return x.reshape(*x.shape[:along], groups, each, *x.shape[along + 1 :])

    total = None
    for offset in np.ndindex(*window):
        part = of_groups(_cut(lhs, places, offset, apart, counts, window_strides), features)
        for feature in range(features):
            one = lax.slice_in_dim(part, feature, feature + 1, axis=along + 1).astype(sums)
            weights = kernel[(*offset, feature)].reshape(groups, outputs // groups)
            shape = [1] * one.ndim
            shape[along : along + 2] = weights.shape
            product = one * weights.reshape(shape)
            total = product if total is None else total + product
    assert total is not None
    found = total.reshape(*total.shape[:along], outputs, *total.shape[along + 2 :])
    order = dict(zip(dn.out_spec, dn.lhs_spec, strict=True))
    return lax.transpose(found, [order[axis] for axis in range(found.ndim)])


def sums_of_places(
    lhs: jax.Array,
    rhs: jax.Array,
    sums: np.dtype,
    *,
    window_strides: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    batch_group_count: int = 1,
    **others: Any,
) -> jax.Array:
    """Convolve like ``lax.conv_general_dilated`` with batch groups: a sum for each place."""
    dn, groups = dimension_numbers, batch_group_count
    # As the kernel lies: batch and features of the input where its outputs and features are.
    order = dict(zip(dn.rhs_spec, dn.lhs_spec, strict=True))
    lhs = lax.transpose(lhs, [order[axis] for axis in range(lhs.ndim)])
    along, *summed = dn.rhs_spec
    places = summed[1:]
    window = [rhs.shape[axis] for axis in places]
    lhs, apart, counts = _padded(lhs, places, window, window_strides, **others)
    features, outputs = lhs.shape[along] // groups, rhs.shape[along] // groups

    def of_groups(x: jax.Array, *each: int) -> jax.Array:
        return x.reshape(*x.shape[:along], groups, *each, *x.shape[along + 1 :]).astype(sums)

    weights = of_groups(rhs, 1, outputs)
    axes = [axis + 2 * (axis > along) for axis in summed]
    found = []
    for offset in np.ndindex(*counts):
        part = _cut(lhs, places, offset, window_strides, window, apart)
        product = of_groups(part, features, 1) * weights
        found.append(product.sum(axes, dtype=sums))  # [groups, features, outputs]
    moved = lax.transpose(jax.numpy.stack(found), (0, 2, 1, 3))
    results = moved.reshape(*counts, features, groups * outputs)
    named = dict(zip((*dn.out_spec[2:], *dn.out_spec[:2]), range(results.ndim), strict=True))
    return lax.transpose(results, [named[axis] for axis in range(results.ndim)])


def _cut(
    x: jax.Array,
    places: Sequence[int],
    offset: Sequence[int],
    apart: Sequence[int],
    counts: Sequence[int],
    strides: Sequence[int],
) -> jax.Array:
    """Return `counts` elements along axes, `strides` apart, from `offset` times `apart` on."""
    for axis, i, step, count, stride in zip(places, offset, apart, counts, strides, strict=True):
        # Where a window fits nowhere, its elements may lie beyond the input.
        start = i * step if count else 0
        x = lax.slice_in_dim(x, start, start + max((count - 1) * stride + 1, 0), stride, axis)
    return x


def _padded(
    lhs: jax.Array,
    places: Sequence[int],
    window: Sequence[int],
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    **_: Any,
) -> tuple[jax.Array, Sequence[int], list[int]]:
    """Return the padded input, how far a window's elements are apart, and its number of places."""
    apart = rhs_dilation or (1,) * len(window)
    reach = [(size - 1) * step + 1 for size, step in zip(window, apart, strict=True)]
    if isinstance(padding, str):
        sizes = [lhs.shape[axis] for axis in places]
        padding = lax.padtype_to_pads(sizes, reach, window_strides, padding)
    config = [(0, 0, 0)] * lhs.ndim
    for axis, (low, high), step in zip(
        places, padding, lhs_dilation or (1,) * len(window), strict=True
    ):
        config[axis] = low, high, step - 1
    # Without the barrier XLA would quantize and pad the input again for each product.
    lhs = lax.optimization_barrier(lax.pad(lhs, np.zeros((), lhs.dtype), config))
    counts = [
        max((lhs.shape[axis] - size) // stride + 1, 0)
        for axis, size, stride in zip(places, reach, window_strides, strict=True)
    ]
    return lhs, apart, counts
