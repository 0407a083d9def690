"""Results of ops that quantize: floats, or values with scales."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .. import checks
from . import arguments, numbers, reference
from .config import DequantizeConfig, QuantizeConfig, quantize_config
from .cotangents import straight_through
from .dequantize import DEQUANTIZE
from .modes import QuantizeLayout, ScalingMode, compute_scale_from_amax


@dataclasses.dataclass(frozen=True)
class Outputs:
    """How an op's float32 numbers become its results.

    Attributes:
        dtype: dtype of the result without scaling. With CURRENT_TENSOR_SCALING numbers are rounded
            to it before they are quantized.
        trailing: how many of the last axes are columns.
        out_dtype: dtype of quantized values.
        mode: what shares a scale.
        layout: whether there are quantized values by row, by column or both.
        scale_dtype: dtype of the scales.
        output_amax: whether the largest magnitude is computed without scaling, too.
    """

    dtype: Any
    trailing: int
    out_dtype: Any
    mode: ScalingMode = ScalingMode.NO_SCALING
    layout: QuantizeLayout = QuantizeLayout.ROWWISE
    scale_dtype: Any = jnp.float32
    output_amax: bool = False

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the FFI call."""
        return {
            "scaling_mode": int(self.mode),
            "quantize_layout": int(self.layout),
            "output_amax_when_no_scaling": self.output_amax,
        }

    def results(self, shape: tuple[int, ...]) -> tuple[jax.ShapeDtypeStruct, ...]:
        """Return output, colwise_output, scale_inv, colwise_scale_inv, updated_amax."""
        if self.mode is not ScalingMode.NO_SCALING:
            return self._config(len(shape)).results(jax.ShapeDtypeStruct(shape, self.dtype))[:5]
        one = jax.ShapeDtypeStruct((1,), jnp.float32)
        nothing = jax.ShapeDtypeStruct((1,), self.dtype)
        return jax.ShapeDtypeStruct(shape, self.dtype), nothing, one, one, one

    def in_jax(self, found: jax.Array, scale: jax.Array, amax: jax.Array) -> tuple[jax.Array, ...]:
        """Return the results for float32 numbers."""
        before = amax.reshape(1)
        if self.mode is ScalingMode.NO_SCALING:
            if self.output_amax:
                most = numbers.of_bits(numbers.absmax_bits(found)).reshape(1)
                before = jnp.where(before >= most, before, most)
            one = jnp.zeros((1,), jnp.float32)
            return found.astype(self.dtype), jnp.zeros((1,), self.dtype), one, one, before
        if self.mode is ScalingMode.CURRENT_TENSOR_SCALING:
            found = self.rounded(found)
            most = numbers.of_bits(numbers.absmax_bits(found)).reshape(1)
            scale = compute_scale_from_amax(most, self.out_dtype)
        config = self._config(found.ndim)
        return reference.quantized(config, found, scale, before)[:5]

    def as_floats(self, found: Sequence[jax.Array]) -> jax.Array:
        """Return the first of all results; quantized values by row dequantized."""
        if not self.quantizes:
            return found[0]
        out, _, scale_inv, _, amax = found[:5]
        return DEQUANTIZE(self._dequantize(out), out, amax, amax, scale_inv)

    def straight(self, make: Callable[[Outputs], Sequence[jax.Array]]) -> jax.Array:
        """Return ``as_floats`` in plain JAX, with the gradient of what isn't quantized.

        Args:
            make: gives all results for the outputs that it is called with.
        """
        found = make(self)
        if not self.quantizes:
            return found[0]
        quantized = reference.dequantized(self._dequantize(found[0]), found[0], found[2])
        plain = make(Outputs(self.dtype, self.trailing, self.dtype))[0]
        return reference.straight(plain, lax.stop_gradient(quantized))

    def _dequantize(self, qvalue: jax.Array) -> DequantizeConfig:
        axis = 0 if self.mode.is_tensor else qvalue.ndim - self.trailing
        return DequantizeConfig(self.mode, self.dtype, axis)

    def rounded(self, found: jax.Array) -> jax.Array:
        """Return numbers rounded to `dtype` for current scaling; others unchanged."""
        if self.mode is not ScalingMode.CURRENT_TENSOR_SCALING:
            return found
        return found.astype(self.dtype).astype(jnp.float32)

    @property
    def quantizes(self) -> bool:
        """Return whether there are quantized values."""
        return self.mode is not ScalingMode.NO_SCALING

    @property
    def follows_rows(self) -> bool:
        """Return whether a batch can fold into rows: no scale spans all."""
        if self.mode is ScalingMode.NO_SCALING:
            return not self.output_amax
        return not self.mode.is_tensor and self.layout is QuantizeLayout.ROWWISE

    @property
    def of_rows(self) -> tuple[bool, bool, bool, bool, bool]:
        """Return which results are of rows where `follows_rows`."""
        return (True, False, self.mode is not ScalingMode.NO_SCALING, False, False)

    def axes(self, names: Sequence[str]) -> list[list[str]] | None:
        """Return axis names to partition by elements; None if impossible.

        Args:
            names: axis names of what is quantized.
        """
        if self.mode is not ScalingMode.NO_SCALING or self.output_amax:
            return None
        return [list(names), *([f"out{i}"] for i in range(4))]

    def cotangent(
        self,
        shape: tuple[int, ...],
        scale_inv: jax.Array,
        colwise_scale_inv: jax.Array,
        cts: Sequence[Any],
    ) -> jax.Array:
        """Return the numbers' cotangent, straight through, from the results'."""
        if self.mode is ScalingMode.NO_SCALING:
            return cts[0]
        scales = (scale_inv, colwise_scale_inv)
        return straight_through(self._config(len(shape)), shape, scales, cts[:2])

    def _config(self, ndim: int) -> QuantizeConfig:
        axis = ndim - self.trailing
        return QuantizeConfig(self.out_dtype, self.mode, self.layout, axis, self.scale_dtype)


def outputs_config(
    op: str,
    x: jax.Array,
    shape: tuple[int, ...],
    trailing: int,
    out_dtype: DTypeLike | None,
    scaling_mode: Any,
    q_layout: Any,
    scale_dtype: DTypeLike | None,
    output_amax_when_no_scaling: bool,
) -> Outputs:
    """Check the static arguments for a result of `shape`, made of x.

    Raises:
        TypeError: a dtype that the mode doesn't have.
        ValueError: an unknown mode or layout, MX blocks that aren't whole, an amax twice.
        NotImplementedError: NVFP4.
    """
    dtype = checks.dtype(op, "x", x.dtype, checks.FLOATS)
    mode = arguments.scaling_mode(op, scaling_mode, quantized=False)
    if mode is ScalingMode.NO_SCALING:
        arguments.layout(op, q_layout)
        checks.dtype(op, "out_dtype", dtype if out_dtype is None else out_dtype, (dtype,))
        return Outputs(dtype, trailing, dtype, output_amax=output_amax_when_no_scaling)
    if output_amax_when_no_scaling:
        raise ValueError(
            f"{op}: output_amax_when_no_scaling must be False with scaling_mode {mode.name}, got "
            "True. The modes per tensor give an amax anyway."
        )
    if out_dtype is None:
        out_dtype = jnp.float8_e4m3fn
    if len(shape) <= trailing:
        raise ValueError(f"{op}: x must have an axis of rows to be quantized, got shape {x.shape}")
    made = jax.ShapeDtypeStruct(shape, dtype)
    config = quantize_config(
        op, made, out_dtype, mode, q_layout, -trailing, scale_dtype, name="the result"
    )
    return Outputs(dtype, trailing, config.out_dtype, mode, config.q_layout, config.scale_dtype)


def given_numbers(
    op: str, outputs: Outputs, scale: jax.Array | None, amax: jax.Array | None
) -> tuple[jax.Array, jax.Array]:
    """Return scale and amax, checked where used; else ones and zeros."""
    scale = jnp.ones((1,), jnp.float32) if scale is None else jnp.asarray(scale)
    amax = jnp.zeros((1,), jnp.float32) if amax is None else jnp.asarray(amax)
    if outputs.mode is ScalingMode.DELAYED_TENSOR_SCALING:
        arguments.number(op, "scale", scale)
    arguments.number(op, "amax", amax)
    return scale, amax
