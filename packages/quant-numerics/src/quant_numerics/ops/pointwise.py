"""Pointwise convolutions: those that are matmuls."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from quant_numerics.array.qarray import QArray
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
