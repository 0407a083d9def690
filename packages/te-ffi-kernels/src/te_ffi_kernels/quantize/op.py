"""dbias_quantize: quantized values by row and by column, scales and column sums in one pass."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..op import Op
from . import arguments, reference
from .config import QuantizeConfig, quantize_config
from .cotangents import straight_through
from .modes import turned
from .sharding import partition_quantize


def dbias_quantize(
    x: jax.Array,
    scale: jax.Array,
    amax: jax.Array,
    sr_rng_state: jax.Array,
    post_rht_amax: jax.Array,
    rht_matrix: jax.Array,
    out_dtype: DTypeLike,
    scaling_mode: Any,
    q_layout: Any,
    flatten_axis: int = -1,
    scale_dtype: DTypeLike | None = None,
    is_dbias: bool = False,
    is_outer: bool = True,
    stochastic_rounding: bool = False,
    use_rht: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Quantize an array by row, column or both, and sum columns.

    The arguments are those of Transformer Engine's primitive. x is taken as a matrix whose rows
    are the axes before `flatten_axis`. Numbers are rounded half to even and saturate, infinities
    too; NaN becomes NaN (0x7f) in float8 and 0 in int8, and counts in no maximum. Subnormal float32
    numbers count as zero.

    - Per tensor, quantized values are of ``x * scale``; quantized values by column are those by
      row, transposed.
    - MXFP8: blocks of 32 along the last axis, or by column along the axis before `flatten_axis`;
      not transposed. Scales as in ``ScalingMode``; that of a block with an infinity is 2**127.
    - Per channel (ours): each row has a scale as ``compute_scale_from_amax`` gives it, by column
      each column: ``largest quantized value / absmax``, at most 2**126, and 1 where absmax is 0 or
      infinite. Quantized values are of x times that, and `scale_inv` is 1 over it. Quantized values
      by column are transposed.

    Args:
        x: float32, bfloat16 or float16, of 2 or more axes.
        scale: float32[1]; used per tensor (see ``compute_scale_from_amax``).
        amax: float32[1]: the largest magnitude so far.
        sr_rng_state: not used (NVFP4).
        post_rht_amax: not used (NVFP4).
        rht_matrix: not used (NVFP4).
        out_dtype: float8_e4m3fn, float8_e5m2, or (ours) int8, which MXFP8 doesn't have.
        scaling_mode: a ``ScalingMode`` or its number.
        q_layout: a ``QuantizeLayout`` or its number.
        flatten_axis: the first axis that is columns.
        scale_dtype: float32; for MXFP8 float8_e8m0fnu, or uint8 with the same bits.
        is_dbias: whether to sum the columns.
        is_outer: not used (Transformer Engine pads scales inside).
        stochastic_rounding: must be False (NVFP4).
        use_rht: must be False (NVFP4).

    Returns:
        ``(out, colwise_out, scale_inv, colwise_scale_inv, updated_amax, dbias)``. Results that are
        not wanted are zeros of shape (1,). `updated_amax` is float32[1]: per tensor the maximum of
        `amax` and the magnitudes of x, else `amax`. `dbias` is summed in float32 and rounded to
        x's dtype, of shape ``x.shape[flatten_axis:]``.

    The gradient is straight-through: quantized values count as x over their scale, the scale counts
    as constant, and nothing counts as cut off. Cotangents of float8 values have their dtype, with
    its few bits and its range; quantized values in int8 have no cotangents.

    Raises:
        TypeError: a dtype that the mode doesn't have.
        ValueError: shapes, modes or layouts that can't be.
        NotImplementedError: NVFP4 and its options.
    """
    del is_outer
    op = "dbias_quantize"
    arguments.no_nvfp4_options(op, stochastic_rounding, use_rht)
    config = quantize_config(
        op, x, out_dtype, scaling_mode, q_layout, flatten_axis, scale_dtype, is_dbias=is_dbias
    )
    if config.scaling_mode.is_tensor:
        arguments.number(op, "scale", scale)
    arguments.number(op, "amax", amax)
    extra = (sr_rng_state, post_rht_amax, rht_matrix)
    return _QUANTIZE(config, *map(jnp.asarray, (x, scale, amax, *extra)))


def _reference(
    config: QuantizeConfig, x: jax.Array, scale: jax.Array, amax: jax.Array, *_: jax.Array
) -> tuple[jax.Array, ...]:
    return reference.quantized(config, x, scale, amax)


def _attributes(config: QuantizeConfig, *_: jax.Array) -> dict[str, Any]:
    return {
        "scaling_mode": int(config.scaling_mode),
        "q_layout": int(config.q_layout),
        "is_dbias": config.is_dbias,
        "flatten_axis": config.axis,
        "stochastic_rounding": False,
        "use_rht": False,
    }


def _gradient(config: QuantizeConfig, saved: Any, cts: Any) -> Any:
    like, *scales = saved
    rowwise, colwise, *_, dbias = cts
    mode, axis = config.scaling_mode, config.axis
    by_column = colwise.shape if mode.is_mx else turned(colwise.shape, colwise.ndim - axis)
    shape = rowwise.shape if config.q_layout.has_rowwise else by_column
    grad = straight_through(config, shape, scales, (rowwise, colwise))
    if config.is_dbias:
        grad = grad + jnp.broadcast_to(dbias.astype(jnp.float32), shape)
    return grad.astype(like.dtype), *(None,) * 5


_QUANTIZE = Op(
    "dbias_quantize",
    _reference,
    results=lambda config, x, *_: config.results(x),
    attributes=_attributes,
    workspace=lambda *_: jax.ShapeDtypeStruct((1,), jnp.float32),
    partition=partition_quantize,
    save=lambda config, operands, found: (jnp.zeros((), operands[0].dtype), found[2], found[3]),
    gradient=_gradient,
)
