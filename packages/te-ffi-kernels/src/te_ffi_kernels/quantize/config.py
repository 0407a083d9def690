"""The static arguments of the ops, checked; traces are keyed by them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import checks
from . import arguments
from .modes import (
    QuantizeLayout,
    ScalingMode,
    grouped_scale_size,
    scale_shape,
    turned,
)


@dataclasses.dataclass(frozen=True)
class QuantizeConfig:
    """The static arguments of dbias_quantize and grouped_quantize.

    `axis` is their flatten_axis, counted from the front.
    """

    out_dtype: Any
    scaling_mode: ScalingMode
    q_layout: QuantizeLayout
    axis: int
    scale_dtype: Any
    is_dbias: bool = False

    def results(self, x: Any) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return dbias_quantize's results without its workspace; unwanted ones (1,)."""
        mode, axis = self.scaling_mode, self.axis
        rowwise, colwise = self.q_layout.has_rowwise, self.q_layout.has_colwise
        by_column = x.shape if mode.is_mx else turned(x.shape, axis)
        scales = [
            scale_shape(x.shape, mode, axis, by_column=by) if wanted else (1,)
            for by, wanted in ((False, rowwise), (True, colwise))
        ]
        return (
            jax.ShapeDtypeStruct(x.shape if rowwise else (1,), self.out_dtype),
            jax.ShapeDtypeStruct(by_column if colwise else (1,), self.out_dtype),
            jax.ShapeDtypeStruct(scales[0], self.scale_dtype),
            jax.ShapeDtypeStruct(scales[1], self.scale_dtype),
            jax.ShapeDtypeStruct((1,), jnp.float32),
            jax.ShapeDtypeStruct(x.shape[axis:] if self.is_dbias else (1,), x.dtype),
        )

    def grouped_results(self, x: Any, groups: int) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return grouped_quantize's results without its workspace; unwanted ones (1,)."""
        rowwise, colwise = self.q_layout.has_rowwise, self.q_layout.has_colwise
        count = arguments.size(x.shape)
        scales = [
            grouped_scale_size(x.shape, groups, self.scaling_mode, self.axis, by_column=by)
            if wanted
            else 1
            for by, wanted in ((False, rowwise), (True, colwise))
        ]
        return (
            jax.ShapeDtypeStruct((count if rowwise else 1,), self.out_dtype),
            jax.ShapeDtypeStruct((count if colwise else 1,), self.out_dtype),
            jax.ShapeDtypeStruct((scales[0],), self.scale_dtype),
            jax.ShapeDtypeStruct((scales[1],), self.scale_dtype),
            jax.ShapeDtypeStruct((groups,), jnp.float32),
        )


@dataclasses.dataclass(frozen=True)
class DequantizeConfig:
    """Static options of dequantize; `axis` counts from the front."""

    mode: ScalingMode
    dtype: Any
    axis: int
    is_colwise: bool = False

    @property
    def by_column(self) -> bool:
        """Return whether scales are for parts of columns."""
        return self.is_colwise and self.mode.is_mx


def quantize_config(
    op: str,
    x: jax.Array | jax.ShapeDtypeStruct,
    out_dtype: DTypeLike,
    scaling_mode: Any,
    q_layout: Any,
    flatten_axis: int,
    scale_dtype: DTypeLike | None,
    *,
    is_dbias: bool = False,
    grouped: bool = False,
    name: str = "x",
) -> QuantizeConfig:
    """Check the static arguments against x, which errors call `name`.

    Raises:
        TypeError: a dtype that the mode doesn't have.
        ValueError: an unknown mode or layout, an axis out of range, MX blocks that aren't whole.
        NotImplementedError: NVFP4.
    """
    mode = arguments.scaling_mode(op, scaling_mode, quantized=True)
    layout = arguments.layout(op, q_layout)
    checks.dtype(op, name, x.dtype, checks.FLOATS)
    qvalue = arguments.code_dtype(op, "out_dtype", out_dtype, mode)
    scales = arguments.scales_dtype(op, "scale_dtype", scale_dtype, mode)
    axis = arguments.axis(op, "flatten_axis", flatten_axis, name, x.shape)
    if mode.is_mx:
        if layout.has_rowwise:
            arguments.blocks(op, name, x.shape, x.ndim - 1)
        # Groups of rows are known when the op runs; the kernel checks them.
        if layout.has_colwise and not grouped:
            arguments.blocks(op, name, x.shape, axis - 1)
        if layout.has_colwise and grouped and arguments.size(x.shape[:axis]) % 32:
            arguments.blocks(op, name, x.shape, axis - 1)
    return QuantizeConfig(qvalue, mode, layout, axis, scales, is_dbias)
