"""grouped_quantize: groups of rows, each with separate scales."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import checks
from ..op import Op
from . import reference
from .config import QuantizeConfig, quantize_config
from .cotangents import grouped_straight_through
from .modes import ScalingMode


def grouped_quantize(
    x: jax.Array,
    scale: jax.Array,
    group_sizes: jax.Array,
    out_dtype: DTypeLike,
    scaling_mode: Any,
    q_layout: Any,
    flatten_axis: int = -1,
    scale_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Quantize groups of x one by one, as ``dbias_quantize`` would.

    The arguments are those of Transformer Engine's primitive. Groups are of x's first axis, one
    after the other; the axes from there to `flatten_axis` are rows of theirs.

    Args:
        x: float32, bfloat16 or float16, of 2 or more axes.
        scale: float32[groups]; used per tensor.
        group_sizes: int32[groups], with a sum of at most ``x.shape[0]``. Rows beyond it aren't
            read, and what they have in the results is zero.
        out_dtype: float8_e4m3fn, float8_e5m2, or (ours) int8, which MXFP8 doesn't have.
        scaling_mode: a ``ScalingMode`` or its number.
        q_layout: a ``QuantizeLayout`` or its number.
        flatten_axis: the first axis that is columns.
        scale_dtype: float32; for MXFP8 float8_e8m0fnu, or uint8 with the same bits.

    Returns:
        ``(out, colwise_out, scale_inv, colwise_scale_inv, updated_amax)``, all flat: the results of
        the groups one after the other, quantized values by column transposed within each group (not
        with MXFP8). There is a scale for each group, empty ones too. `updated_amax` is
        float32[groups]: per tensor the largest magnitude of each group, else 0. What isn't wanted
        has shape (1,).

    The gradient is straight-through, as that of ``dbias_quantize``.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``dbias_quantize``.
        jax.errors.JaxRuntimeError: when it runs: negative groups, a larger sum, or MXFP8 by column
            with groups that aren't multiples of 32 rows. On CUDA, where nobody waits for what the
            sizes are, all scales and magnitudes are NaN then. (The reference can't tell.)
    """
    op = "grouped_quantize"
    config = quantize_config(
        op, x, out_dtype, scaling_mode, q_layout, flatten_axis, scale_dtype, grouped=True
    )
    checks.dtype(op, "group_sizes", group_sizes.dtype, (jnp.int32,))
    if group_sizes.ndim != 1:
        raise ValueError(f"{op}: group_sizes must have one axis, got shape {group_sizes.shape}")
    if config.scaling_mode.is_tensor:
        checks.dtype(op, "scale", scale.dtype, (jnp.float32,))
        checks.shape(op, "scale", scale, group_sizes.shape, "one for each of group_sizes")
    return _GROUPED(config, x, jnp.asarray(scale), group_sizes)


def grouped_quantize_v2(
    x: jax.Array,
    scale: jax.Array,
    group_sizes: jax.Array,
    out_dtype: DTypeLike,
    q_layout: Any,
    flatten_axis: int = -1,
    scale_dtype: DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]:
    """Quantize groups of x to MXFP8, whose sizes the host never reads.

    The arguments are those of Transformer Engine's primitive for CUDA graphs. ``grouped_quantize``,
    which this calls, reads sizes on the device in every mode. Scales aren't swizzled, and rows
    needn't be multiples of 128.

    Args:
        scale: not used.

    The other arguments are those of ``grouped_quantize``.

    Returns:
        As ``grouped_quantize``.

    Raises:
        TypeError, ValueError, jax.errors.JaxRuntimeError: as ``grouped_quantize``.
    """
    mode = ScalingMode.MXFP8_1D_SCALING
    return grouped_quantize(
        x, scale, group_sizes, out_dtype, mode, q_layout, flatten_axis, scale_dtype
    )


def _attributes(config: QuantizeConfig, *_: jax.Array) -> dict[str, Any]:
    return {
        "scaling_mode": int(config.scaling_mode),
        "q_layout": int(config.q_layout),
        "flatten_axis": config.axis,
    }


def _gradient(config: QuantizeConfig, saved: Any, cts: Any) -> Any:
    like, sizes, *scales = saved
    grad = grouped_straight_through(config, like.shape[1:], sizes, scales, cts[:2])
    return grad.astype(like.dtype), None, None


_GROUPED = Op(
    "grouped_quantize",
    reference.grouped,
    results=lambda config, x, scale, sizes: config.grouped_results(x, sizes.shape[0]),
    attributes=_attributes,
    # The shape of x, without its numbers.
    save=lambda config, operands, found: (
        jnp.zeros((0, *operands[0].shape), operands[0].dtype),
        operands[2],
        *found[2:4],
    ),
    gradient=_gradient,
)
