"""The activations in plain JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._norms.reference import straight
from .._te import checks
from .._te.modes import QuantizeLayout, ScalingMode
from .._te.outputs import given_numbers, outputs_config
from .._te.reference_dequantize import dequantized
from .config import (
    ActivationConfig,
    ActivationParams,
    ClampedSwigluParams,
    check_dz,
    check_x,
)
from .config import (
    activation_type as names_of,
)
from .config import (
    params as params_of,
)


def act_lu(
    x: jax.Array,
    activation_type: str | Sequence[str],
    act_params: ActivationParams | None = None,
    out_dtype: DTypeLike | None = None,
    scaling_mode: Any = ScalingMode.NO_SCALING,
    q_layout: Any = QuantizeLayout.ROWWISE,
    scale: jax.Array | None = None,
    amax: jax.Array | None = None,
    scale_dtype: DTypeLike | None = None,
    output_amax_when_no_scaling: bool = False,
) -> tuple[jax.Array, ...]:
    """As ``te_ffi_kernels.act_lu``."""
    op = "act_lu"
    names = names_of(op, activation_type)
    shape = check_x(op, names, x)
    outputs = outputs_config(
        op, x, shape, 1, out_dtype, scaling_mode, q_layout, scale_dtype,
        output_amax_when_no_scaling,
    )  # fmt: skip
    config = ActivationConfig(names, params_of(op, act_params), outputs)
    return forward(config, x, *given_numbers(op, outputs, scale, amax))


def forward(
    config: ActivationConfig, x: jax.Array, scale: jax.Array, amax: jax.Array
) -> tuple[jax.Array, ...]:
    """The results for checked arguments."""
    wide = x.astype(jnp.float32)
    found, _ = _point(config, wide[..., 0, :])
    if config.is_gated:
        found = found * _gate(config, wide[..., 1, :])[0]
    return config.outputs.in_jax(found, scale, amax)


def quantize_dact_dbias(
    dz: jax.Array,
    x: jax.Array,
    activation_type: str | Sequence[str] = ("gelu",),
    is_dbias: bool = True,
    act_params: ActivationParams | None = None,
    out_dtype: DTypeLike | None = None,
    scaling_mode: Any = ScalingMode.NO_SCALING,
    q_layout: Any = QuantizeLayout.ROWWISE,
    scale: jax.Array | None = None,
    amax: jax.Array | None = None,
    scale_dtype: DTypeLike | None = None,
    output_amax_when_no_scaling: bool = False,
) -> tuple[jax.Array, ...]:
    """As ``te_ffi_kernels.quantize_dact_dbias``."""
    op = "quantize_dact_dbias"
    names = names_of(op, activation_type)
    check_dz(op, names, dz, x)
    outputs = outputs_config(
        op, x, x.shape, 2, out_dtype, scaling_mode, q_layout, scale_dtype,
        output_amax_when_no_scaling,
    )  # fmt: skip
    config = ActivationConfig(names, params_of(op, act_params), outputs, bool(is_dbias))
    return backward(config, dz, x, *given_numbers(op, outputs, scale, amax))


def dact_lu(
    dz: jax.Array,
    x: jax.Array,
    activation_type: str | Sequence[str],
    act_params: ActivationParams | None = None,
    out_dtype: DTypeLike | None = None,
    scaling_mode: Any = ScalingMode.NO_SCALING,
    q_layout: Any = QuantizeLayout.ROWWISE,
    scale: jax.Array | None = None,
    amax: jax.Array | None = None,
    scale_dtype: DTypeLike | None = None,
    output_amax_when_no_scaling: bool = False,
) -> tuple[jax.Array, ...]:
    """As ``te_ffi_kernels.dact_lu``."""
    return quantize_dact_dbias(
        dz, x, activation_type, False, act_params, out_dtype, scaling_mode, q_layout, scale, amax,
        scale_dtype, output_amax_when_no_scaling,
    )[:5]  # fmt: skip


def backward(
    config: ActivationConfig, dz: jax.Array, x: jax.Array, scale: jax.Array, amax: jax.Array
) -> tuple[jax.Array, ...]:
    """The results for checked arguments."""
    found = config.outputs.rounded(derivative(config, dz, x))
    results = config.outputs.in_jax(found, scale, amax)
    sums = found.sum(tuple(range(x.ndim - 2))) if config.is_dbias else jnp.zeros((1,), jnp.float32)
    return (*results, sums.astype(x.dtype))


def derivative(config: ActivationConfig, dz: jax.Array, x: jax.Array) -> jax.Array:
    """dx in float32."""
    wide, dz = x.astype(jnp.float32), dz.astype(jnp.float32)
    value, slope = _point(config, wide[..., 0, :])
    if not config.is_gated:
        return (dz * slope)[..., None, :]
    factor, follows = _gate(config, wide[..., 1, :])
    return jnp.stack([dz * slope * factor, dz * value * follows], axis=-2)


def activation(
    x: jax.Array,
    activation_type: str | Sequence[str] = ("gelu",),
    act_params: ActivationParams | None = None,
    out_dtype: DTypeLike | None = None,
    scaling_mode: Any = ScalingMode.NO_SCALING,
    scale: jax.Array | None = None,
) -> jax.Array:
    """As ``te_ffi_kernels.activation``."""
    args = (x, activation_type, act_params)
    found = act_lu(*args, out_dtype, scaling_mode, scale=scale)
    mode = checks.scaling_mode("activation", scaling_mode, quantized=False)
    if mode is ScalingMode.NO_SCALING:
        return found[0]
    plain = act_lu(*args)[0]
    return straight(
        plain, lax.stop_gradient(dequantized(mode, x.dtype, x.ndim - 2, False, found[0], found[2]))
    )


def _clamped(config: ActivationConfig) -> ClampedSwigluParams:
    return config.params.clamped_swiglu


def _swish(x: jax.Array, u: jax.Array, slope: jax.Array | float) -> tuple[jax.Array, jax.Array]:
    """x * sigmoid(u) and its derivative, where u' is slope; 0 where the sigmoid is."""
    gate = jax.nn.sigmoid(u)
    change = gate * jax.nn.sigmoid(-u)
    rest = jnp.where(change == 0, 0, x * slope * change)
    return jnp.where(gate == 0, 0, x * gate), gate + rest


def _point(config: ActivationConfig, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The function of the first part, and its derivative."""
    name = config.activation_type[0]
    if name == "gelu":
        square = x * x
        root, cube = 1.5957691216, 0.0713548163  # 2 sqrt(2 / pi), that times 0.044715
        return _swish(x, x * (root + cube * square), root + 3 * cube * square)
    if name == "sigmoid":
        gate = jax.nn.sigmoid(x)
        return gate, gate * jax.nn.sigmoid(-x)
    if name == "silu":
        return _swish(x, x, 1.0)
    if name == "quick_gelu":
        return _swish(x, 1.702 * x, 1.702)
    if name == "clamped_silu":
        given = _clamped(config)
        cut = jnp.minimum(x, given.limit)
        value, slope = _swish(cut, given.alpha * cut, given.alpha)
        return value, jnp.where(x > given.limit, 0, slope)
    part = jnp.where(x <= 0, 0, x)
    if name == "relu":
        return part, (x > 0).astype(jnp.float32)
    return part * part, 2 * part


def _gate(config: ActivationConfig, x: jax.Array) -> tuple[jax.Array, jax.Array | float]:
    """What the function is multiplied with, and its derivative."""
    if config.activation_type[1] == "linear":
        return x, 1.0
    given = _clamped(config)
    cut = jnp.clip(x, -given.limit, given.limit)
    return cut + given.glu_linear_offset, (cut == x).astype(jnp.float32)
