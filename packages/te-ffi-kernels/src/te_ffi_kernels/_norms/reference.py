"""The norms in plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from .._te import checks
from .._te.modes import QuantizeLayout, ScalingMode
from .._te.outputs import given_numbers, outputs_config
from .._te.reference_dequantize import dequantized
from .config import NormConfig, check_backward, check_epsilon, check_weights
from .config import norm_type as kind_of


def normalization_fwd(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None,
    zero_centered_gamma: bool,
    epsilon: float,
    norm_type: Any,
    out_dtype: DTypeLike | None = None,
    scaling_mode: Any = ScalingMode.NO_SCALING,
    q_layout: Any = QuantizeLayout.ROWWISE,
    scale: jax.Array | None = None,
    amax: jax.Array | None = None,
    scale_dtype: DTypeLike | None = None,
    output_amax_when_no_scaling: bool = False,
) -> tuple[jax.Array, ...]:
    """As ``te_ffi_kernels.normalization_fwd``."""
    op = "normalization_fwd"
    kind = kind_of(op, norm_type)
    beta = check_weights(op, kind, x, gamma, beta)
    outputs = outputs_config(
        op, x, x.shape, 1, out_dtype, scaling_mode, q_layout, scale_dtype,
        output_amax_when_no_scaling,
    )  # fmt: skip
    epsilon = check_epsilon(op, epsilon)
    config = NormConfig(kind, bool(zero_centered_gamma), epsilon, outputs)
    return forward(config, x, *given_numbers(op, outputs, scale, amax), gamma, beta)


def forward(
    config: NormConfig,
    x: jax.Array,
    scale: jax.Array,
    amax: jax.Array,
    gamma: jax.Array,
    beta: jax.Array,
) -> tuple[jax.Array, ...]:
    """The results for checked arguments."""
    assert config.outputs is not None
    wide = x.astype(jnp.float32)
    factor = gamma.astype(jnp.float32)
    factor = factor + 1 if config.zero_centered_gamma else factor
    mean = wide.mean(-1, keepdims=True)
    rest = wide - mean if config.is_layer else wide
    rsigma = lax.rsqrt((rest * rest).mean(-1, keepdims=True) + jnp.float32(config.epsilon))
    found = rest * rsigma * _row(factor, x)
    if config.is_layer:
        found = found + _row(beta.astype(jnp.float32), x)
    mu = mean.squeeze(-1) if config.is_layer else jnp.zeros((1,), jnp.float32)
    return (*config.outputs.in_jax(found, scale, amax), mu, rsigma.squeeze(-1))


def normalization_bwd(
    dz: jax.Array,
    x: jax.Array,
    mu: jax.Array | None,
    rsigma: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None,
    zero_centered_gamma: bool,
    epsilon: float,
    norm_type: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """As ``te_ffi_kernels.normalization_bwd``."""
    op = "normalization_bwd"
    kind = kind_of(op, norm_type)
    check_weights(op, kind, x, gamma, gamma if beta is None else beta)
    check_epsilon(op, epsilon)
    mu = check_backward(op, kind, dz, x, mu, rsigma)
    config = NormConfig(kind, bool(zero_centered_gamma))
    dx, dgamma, dbeta = backward(config, dz, x, mu, rsigma, gamma)
    return dx, dgamma, dbeta if config.is_layer else None


def backward(
    config: NormConfig,
    dz: jax.Array,
    x: jax.Array,
    mu: jax.Array,
    rsigma: jax.Array,
    gamma: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The results for checked arguments."""
    wide, factor = x.astype(jnp.float32), gamma.astype(jnp.float32)
    factor = factor + 1 if config.zero_centered_gamma else factor
    dz = dz.astype(jnp.float32)
    normal = (wide - mu[..., None] if config.is_layer else wide) * rsigma[..., None]
    slope = dz * _row(factor, x)
    rest = slope - normal * (slope * normal).mean(-1, keepdims=True)
    if config.is_layer:
        rest = rest - slope.mean(-1, keepdims=True)
    rows = tuple(range(x.ndim - 1))
    dgamma = (dz * normal).sum(rows).astype(gamma.dtype)
    dbeta = dz.sum(rows) if config.is_layer else jnp.zeros((1,), jnp.float32)
    dx = (rest * rsigma[..., None]).astype(x.dtype)
    return dx, dgamma, dbeta.astype(gamma.dtype)


def layernorm(
    x: jax.Array,
    gamma: jax.Array,
    beta: jax.Array | None = None,
    norm_type: Any = "layernorm",
    zero_centered_gamma: bool = False,
    epsilon: float = 1e-6,
    out_dtype: DTypeLike | None = None,
    scaling_mode: Any = ScalingMode.NO_SCALING,
    scale: jax.Array | None = None,
) -> jax.Array:
    """As ``te_ffi_kernels.layernorm``."""
    args = (x, gamma, beta, zero_centered_gamma, epsilon, norm_type)
    found = normalization_fwd(*args, out_dtype, scaling_mode, scale=scale)
    mode = checks.scaling_mode("layernorm", scaling_mode, quantized=False)
    if mode is ScalingMode.NO_SCALING:
        return found[0]
    plain = normalization_fwd(*args)[0]
    return straight(
        plain, lax.stop_gradient(dequantized(mode, x.dtype, x.ndim - 1, False, found[0], found[2]))
    )


@jax.custom_jvp
def straight(x: jax.Array, quantized: jax.Array) -> jax.Array:
    """The second, with the derivative of the first."""
    del x
    return quantized


@straight.defjvp
def _straight_jvp(primals: Any, tangents: Any) -> Any:
    return primals[1], tangents[0]


def _row(weights: jax.Array, x: jax.Array) -> jax.Array:
    return weights.reshape((1,) * (x.ndim - 1) + weights.shape)
