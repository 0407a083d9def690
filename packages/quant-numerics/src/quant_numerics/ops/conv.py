"""Quantized convolution: integer accumulation and float rescaling."""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from quant_numerics.array.explicit import sharded_as
from quant_numerics.array.qarray import Operand, QArray, as_operand, dequantize, effective_scale
from quant_numerics.ops.arithmetic import (
    INT32_MAX,
    largest_number,
    prepared,
)
from quant_numerics.ops.cpu_conv import (
    FLOAT32_EXACT,
    int_conv,
    products_of_small_groups,
)
from quant_numerics.ops.dot import dot_general


def is_pointwise(
    kernel_shape: Sequence[int],
    numbers: lax.ConvDimensionNumbers,
    *,
    padding: str | Sequence[tuple[int, int]] = "VALID",
    lhs_dilation: Sequence[int] | None = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    **_: Any,
) -> bool:
    """Return whether a convolution is a matmul over input features, at some places of the input.

    Args:
      kernel_shape: shape of the kernel.
      numbers: what ``jax.lax.conv_dimension_numbers`` returns.
      padding: as in ``conv_general_dilated``, like the arguments after it.
      lhs_dilation: as there.
      feature_group_count: as there.
      batch_group_count: as there.
    """
    window = math.prod(kernel_shape[axis] for axis in numbers.rhs_spec[2:])
    # A window of one element needs no padding, whatever the stride is.
    pads = not isinstance(padding, str) and bool(np.any(np.asarray(padding)))
    dilates = lhs_dilation is not None and math.prod(lhs_dilation) > 1
    grouped = feature_group_count * batch_group_count > 1
    return window == 1 and not (pads or dilates or grouped)


def pointwise_conv(
    lhs: QArray,
    rhs: QArray,
    numbers: lax.ConvDimensionNumbers,
    window_strides: Sequence[int],
    precision: Any,
    preferred_element_type: DTypeLike | None,
) -> jax.Array:
    """Convolve as a matmul, so that scales of the kernel may differ by tiles of input features."""
    batch, feature, *places = numbers.lhs_spec
    strides = dict(zip(places, window_strides, strict=True))
    taken = [strides.get(axis, 1) for axis in range(lhs.ndim)]
    if math.prod(taken) > 1:
        values = lax.slice(lhs.qvalue, [0] * lhs.ndim, lhs.shape, taken)
        lhs = dataclasses.replace(lhs, qvalue=values)
    dims = (((feature,), (numbers.rhs_spec[1],)), ((), ()))
    found = dot_general(lhs, rhs, dims, precision, preferred_element_type)
    # The axes of the input without its features, then those of the kernel: all but one have size 1.
    kept = [axis for axis in range(lhs.ndim) if axis != feature]
    found = found.reshape(*found.shape[: len(kept)], rhs.shape[numbers.rhs_spec[0]])
    came = [kept.index(batch), len(kept), *map(kept.index, places)]
    order = [came[numbers.out_spec.index(axis)] for axis in range(lhs.ndim)]
    return jnp.transpose(found, order)


def conv_general_dilated(
    lhs: Operand,
    rhs: Operand,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Convolve like ``jax.lax.conv_general_dilated``; either side may be a QArray.

    - Two integer QArrays: quantized values reach ``lax`` as int8, are summed in int32, and rescaled
      in float32, times the lhs scale, then times the rhs scale. See arXiv:1712.05877, section 2.2,
      and, for scales per output feature, arXiv:2004.09602, section 3.2. With int16, or where an
      int8 side has zero points, ``lax`` gets int32: zero points are subtracted before, so that
      padding is an exact zero.
    - Other two QArrays, and one QArray: in the dtypes that ``dot_general`` uses.
    - No QArray: plain ``lax`` in the wider of the two dtypes.

    The lhs may have one scale, or one per batch element; the rhs one scale, or one per output
    feature: these factor out of every sum. A rhs with other scales, such as tiles, is dequantized;
    the lhs must then be a float array, or the convolution pointwise: with a window of one element,
    and without padding, groups and input dilation it is a matmul (``dot_general``).

    A non-finite value makes its slice non-finite: if a batch element (or kernel feature) has one,
    all outputs of that batch element (feature) are non-finite, also those whose window does not
    touch it.

    int32 never overflows: sums of more products (window elements times input features) than
    ``(2**31 - 1) // (max_lhs * max_rhs)``, 131071 for int8 by int8, are taken in groups of input
    features that are added in float32.

    Args:
      lhs: input, QArray, PackedQArray or array of bfloat16, float16, float32 or float64.
      rhs: kernel, the same.
      window_strides: as in ``lax``, like all arguments that are not listed here.
      padding: as in ``lax``.
      lhs_dilation: as in ``lax``; strides of a transposed convolution.
      rhs_dilation: as in ``lax``.
      dimension_numbers: None, three strings, or a ``lax.ConvDimensionNumbers``.
      feature_group_count: as in ``lax``.
      batch_group_count: as in ``lax``.
      precision: where a side is float; other convolutions are exact.
      preferred_element_type: dtype of the output, a supported float dtype; by default the wider
        of the logical dtypes (float32 for bfloat16 with float16).
      out_sharding: as in ``lax``.

    Returns:
      Array with the shape that ``lax`` gives.

    Raises:
      ValueError: a scale of another shape; or two integer QArrays with so many products per
        output that int32 could overflow, and no way to take fewer: a window of more elements than
        that, or groups of input features.
      TypeError: a side that is neither a QArray nor a supported float array, or what ``lax``
        refuses.
    """
    lhs, rhs = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    dn = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    plain = functools.partial(
        lax.conv_general_dilated,
        window_strides=window_strides,
        padding=padding,
        lhs_dilation=lhs_dilation,
        rhs_dilation=rhs_dilation,
        dimension_numbers=dn,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
    )
    groups = feature_group_count, batch_group_count
    both = isinstance(lhs, QArray) and isinstance(rhs, QArray)
    if both and _is_tiled(rhs, dn) and is_pointwise(rhs.shape, dn, **plain.keywords):

        def multiply(left: QArray, right: QArray, out_sharding: Any) -> jax.Array:
            _channel_scale(left, dn.lhs_spec[0], "lhs", "batch element")  # refuses others
            given = left, right, dn, window_strides, precision, preferred_element_type
            return pointwise_conv(*given)

        return sharded_as(multiply, plain, (lhs, rhs), out_sharding)
    run = functools.partial(_conv, plain, dn, groups, precision, preferred_element_type)
    return sharded_as(run, plain, (lhs, rhs), out_sharding)


def _is_tiled(rhs: QArray, dn: lax.ConvDimensionNumbers) -> bool:
    """Return whether scales differ within a sum, so that they don't factor out of it."""
    return math.prod(n for a, n in enumerate(rhs.scale.shape) if a != dn.rhs_spec[0]) > 1


def _conv(
    plain: Callable[..., jax.Array],
    dn: lax.ConvDimensionNumbers,
    groups: tuple[int, int],
    precision: Any,
    preferred_element_type: DTypeLike | None,
    lhs: QArray | jax.Array,
    rhs: QArray | jax.Array,
    out_sharding: Any,
) -> jax.Array:
    """Convolve with `plain`, which convolves arrays and has the other arguments."""
    feature_group_count, batch_group_count = groups
    if isinstance(rhs, QArray) and not isinstance(lhs, QArray):
        rhs = dequantize(rhs) if _is_tiled(rhs, dn) else rhs
    dtype, how, values_l, values_r = prepared(lhs, rhs, precision, preferred_element_type)
    run = functools.partial(plain, out_sharding=out_sharding)

    def conv(left: jax.Array, right: jax.Array) -> jax.Array:
        return run(left, right, precision=how.precision, preferred_element_type=how.sums)

    def float_conv(left: jax.Array, right: jax.Array) -> jax.Array:
        float32, highest = jnp.dtype(jnp.float32), lax.Precision.HIGHEST
        return run(left, right, precision=highest, preferred_element_type=float32)

    features = values_r.shape[dn.rhs_spec[1]]
    window = math.prod(values_r.shape[a] for a in dn.rhs_spec[2:])
    given = plain.keywords  # type: ignore[attr-defined]
    quantized = isinstance(lhs, QArray) or isinstance(rhs, QArray)
    is_plain = out_sharding is None and quantized
    products = None
    in_groups = feature_group_count > 1 or (
        batch_group_count > 1 and window * features <= (how.limit or math.inf)
    )
    if is_plain and in_groups:
        result = jax.eval_shape(conv, values_l, values_r)  # wrong arguments get lax's own error
        shapes = values_l.shape, values_r.shape, result.shape
        products = products_of_small_groups(*shapes, **given)
    if products is not None:
        largest = 0 if how.limit is None else INT32_MAX // how.limit
        # Sums of integers that float32 holds are taken in it: it is faster, with the same result.
        exact = window * features * largest <= FLOAT32_EXACT
        sums = jnp.dtype(jnp.float32) if how.limit is not None and exact else how.sums
        total = how.sums if how.limit is None else jnp.dtype(jnp.float32)
        acc = lax.platform_dependent(
            values_l,
            values_r,
            cpu=lambda left, right: products(left, right, sums, **given).astype(total),
            default=lambda left, right: conv(left, right).astype(total),
        )
    elif how.limit is None:
        acc = conv(values_l, values_r)
    elif window * features <= how.limit:
        acc = int_conv(
            conv,
            float_conv,
            values_l,
            values_r,
            (dn.lhs_spec[1], dn.rhs_spec[1]) if feature_group_count == 1 else None,
            (window, features),
            INT32_MAX // how.limit,
        )
    else:
        if feature_group_count > 1 or window > how.limit:
            raise _too_long(lhs, rhs, window * features, how.limit)
        # In float32 before rescaling: a part that sums to zero must not turn an infinite scale
        # into NaN.
        step = how.limit // window
        acc = sum(
            conv(
                lax.slice_in_dim(values_l, i, min(i + step, features), axis=dn.lhs_spec[1]),
                lax.slice_in_dim(values_r, i, min(i + step, features), axis=dn.rhs_spec[1]),
            ).astype(jnp.float32)
            for i in range(0, features, step)
        )
        assert isinstance(acc, jax.Array)
    if isinstance(lhs, QArray):
        acc = acc * lhs_scale(lhs, dn, acc.shape, batch_group_count).astype(acc.dtype)
    if isinstance(rhs, QArray):
        acc = acc * rhs_scale(rhs, dn, acc.ndim).astype(acc.dtype)
    return acc.astype(dtype)


def _too_long(
    lhs: QArray | jax.Array, rhs: QArray | jax.Array, terms: int, limit: int
) -> ValueError:
    assert isinstance(lhs, QArray)
    assert isinstance(rhs, QArray)
    return ValueError(
        f"the products summed for an output must be at most {limit}, with numbers up to "
        f"{largest_number(lhs)} and {largest_number(rhs)} in int32, got {terms} (window elements "
        f"times input features) for {lhs.qtype} by {rhs.qtype} of shape {rhs.shape}. Keep one side "
        "float, or split the input features over several convolutions and add their results."
    )


def _channel_scale(q: QArray, axis: int, side: str, channel: str) -> jax.Array:
    """Return the scale as a vector along `axis`."""
    expected = [1] * q.ndim
    whole = tuple(expected)
    expected[axis] = q.shape[axis]
    if q.scale.shape not in (whole, tuple(expected)):
        raise ValueError(
            f"the {side} of a convolution must have one scale (shape {whole}) or one per {channel} "
            f"(shape {tuple(expected)}), got scale of shape {q.scale.shape} for values of shape "
            f"{q.shape}. Quantize it with quantize(x, qtype, channel_axes=({axis},))."
        )
    return effective_scale(q).reshape(-1)


def lhs_scale(
    q: QArray, dn: lax.ConvDimensionNumbers, out_shape: Sequence[int], groups: int
) -> jax.Array:
    """Return the scale of the lhs in the output's layout."""
    scale = _channel_scale(q, dn.lhs_spec[0], "lhs", "batch element")
    batch, feature = dn.out_spec[:2]
    shape = [1] * q.ndim
    if scale.size == 1:
        return scale.reshape(shape)
    shape[batch] = out_shape[batch]
    if groups == 1:
        return scale.reshape(shape)
    # The batch is cut in `groups` runs; run g feeds the g-th run of output features.
    shape[feature] = out_shape[feature]
    grid = jnp.repeat(scale.reshape(groups, -1), out_shape[feature] // groups, axis=0)
    return (grid if feature < batch else grid.T).reshape(shape)


def rhs_scale(q: QArray, dn: lax.ConvDimensionNumbers, ndim: int) -> jax.Array:
    """Return the scale of the rhs in the output's layout."""
    scale = _channel_scale(q, dn.rhs_spec[0], "rhs", "output feature")
    shape = [1] * ndim
    shape[dn.out_spec[1]] = scale.size
    return scale.reshape(shape)
