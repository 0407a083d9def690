"""Quantized convolution: integer accumulation and float rescaling."""

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from quant_numerics._dot import INT32_MAX, int_codes, output_dtype
from quant_numerics._qarray import Operand, QArray, as_operand, qtype_of
from quant_numerics._qtypes import compute_dtype, promote_floats


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
) -> jax.Array:
    """``jax.lax.conv_general_dilated`` where either side may be a QArray.

    Both QArrays: the codes reach ``lax`` as int8, are summed in int32, and rescaled in float32,
    times the lhs scale, then times the rhs scale. One QArray: its codes are converted to the dtype
    of the float side and summed in float32 (float64 if that side is float64). None: plain ``lax``
    in the wider of the two dtypes. See arXiv:1712.05877, section 2.2, and, for scales per output
    feature, arXiv:2004.09602, section 3.2.

    The lhs may have one scale, or one per batch element; the rhs one scale, or one per output
    feature: these factor out of every sum. A non-finite value makes its slice non-finite, so
    with one in a batch element (or kernel feature), all outputs of that batch element (feature)
    are non-finite, also those whose window does not touch it.

    Args:
      lhs: input, QArray or array of bfloat16, float16, float32 or float64.
      rhs: kernel, the same.
      window_strides: as in ``lax``, like all arguments that are not listed here.
      padding: as in ``lax``.
      lhs_dilation: as in ``lax``.
      rhs_dilation: as in ``lax``.
      dimension_numbers: None, three strings, or a ``lax.ConvDimensionNumbers``.
      feature_group_count: as in ``lax``.
      batch_group_count: as in ``lax``.
      precision: for float operands; integer convolutions are exact.
      preferred_element_type: dtype of the output, a supported float dtype; by default the wider
        of the logical dtypes (float32 for bfloat16 with float16).

    Returns:
      Array with the shape that ``lax`` gives.

    Raises:
      ValueError: a scale of another shape; or two QArrays with so many terms per output (window
        elements times input features of the kernel) that int32 could overflow, that is more than
        ``(2**31 - 1) // (qmax_lhs * qmax_rhs)``, 133144 for int8 by int8.
      TypeError: a side that is neither a QArray nor a supported float array, or what ``lax``
        refuses.
    """
    lhs, rhs = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    dn = lax.conv_dimension_numbers(lhs.shape, rhs.shape, dimension_numbers)
    dtype = output_dtype(lhs, rhs, preferred_element_type)

    if isinstance(lhs, QArray) and isinstance(rhs, QArray):
        _check_length(lhs, rhs, dn)
        values_l, values_r = int_codes(lhs), int_codes(rhs)
        acc_dtype, precision = jnp.dtype(jnp.int32), None
    else:
        floats = [x.dtype for x in (lhs, rhs) if not isinstance(x, QArray)]
        common = promote_floats(floats[0], floats[-1])
        values_l, values_r = (
            (int_codes(x) if isinstance(x, QArray) else x).astype(common) for x in (lhs, rhs)
        )
        # lax refuses to accumulate in less than the operands' precision.
        acc_dtype = compute_dtype(common) if len(floats) == 1 else promote_floats(common, dtype)

    acc = lax.conv_general_dilated(
        values_l,
        values_r,
        window_strides,
        padding,
        lhs_dilation,
        rhs_dilation,
        dn,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
        precision=precision,
        preferred_element_type=acc_dtype,
    )
    if acc_dtype == jnp.int32:
        acc = acc.astype(jnp.float32)
    if isinstance(lhs, QArray):
        acc = acc * _lhs_scale(lhs, dn, acc.shape, batch_group_count).astype(acc.dtype)
    if isinstance(rhs, QArray):
        acc = acc * _rhs_scale(rhs, dn, acc.ndim).astype(acc.dtype)
    return acc.astype(dtype)


def _check_length(lhs: QArray, rhs: QArray, dn: lax.ConvDimensionNumbers) -> None:
    """Refuses convolutions whose int32 sums could overflow."""
    terms = math.prod(rhs.shape[a] for a in dn.rhs_spec[1:])
    limit = INT32_MAX // (qtype_of(lhs).qmax * qtype_of(rhs).qmax)
    if terms > limit:
        raise ValueError(
            f"a convolution of {lhs.qtype} by {rhs.qtype} with kernel shape {rhs.shape} sums "
            f"{terms} products per output (window elements times input features), and int32 is "
            f"safe only up to {limit}; keep one side float, or split the input features over "
            "several convolutions and add their results"
        )


def _channel_scale(q: QArray, axis: int, side: str, channel: str) -> jax.Array:
    """The scale as a vector along `axis`, of size 1 or the full size."""
    expected = [1] * q.ndim
    whole = tuple(expected)
    expected[axis] = q.shape[axis]
    if q.scale.shape not in (whole, tuple(expected)):
        raise ValueError(
            f"the {side} of a convolution may have one scale (shape {whole}) or one per {channel} "
            f"(shape {tuple(expected)}), got scale of shape {q.scale.shape} for values of shape "
            f"{q.shape}; quantize it with quantize_for_conv(x, qtype, {side!r}, ...)"
        )
    return q.scale.reshape(-1)


def _lhs_scale(
    q: QArray, dn: lax.ConvDimensionNumbers, out_shape: Sequence[int], groups: int
) -> jax.Array:
    """Scale of the lhs in the output's layout."""
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


def _rhs_scale(q: QArray, dn: lax.ConvDimensionNumbers, ndim: int) -> jax.Array:
    """Scale of the rhs in the output's layout."""
    scale = _channel_scale(q, dn.rhs_spec[0], "rhs", "output feature")
    shape = [1] * ndim
    shape[dn.out_spec[1]] = scale.size
    return scale.reshape(shape)
