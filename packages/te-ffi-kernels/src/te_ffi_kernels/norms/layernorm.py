"""layernorm: a norm as a layer of a model uses it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.typing import DTypeLike

from ..op import Op
from ..quantize.modes import QuantizeLayout, ScalingMode
from ..quantize.outputs import given_numbers, outputs_config
from .config import NormConfig, check_epsilon, check_weights
from .config import norm_type as kind_of
from .op import BACKWARD, FORWARD
from .reference import forward


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
    """Norm the rows of an array, as Transformer Engine's ``layernorm``.

    With a scaling mode the result is quantized by row, and dequantized: what training sees of a
    quantized norm. The last three arguments stand for Transformer Engine's quantizer.

    Args:
        x: float32, bfloat16 or float16, of shape (..., n).
        gamma: of x's dtype or float32, of shape (n,).
        beta: as gamma; not used by "rmsnorm", where it may be None.
        norm_type: "layernorm" or "rmsnorm".
        zero_centered_gamma: whether 1 is added to gamma, in float32.
        epsilon: what is added to the variance (or mean square).
        out_dtype: dtype of the quantized values; see ``normalization_fwd``.
        scaling_mode: a ``ScalingMode`` or its number.
        scale: float32[1], used with DELAYED_TENSOR_SCALING.

    Returns:
        An array of x's shape and dtype. Differentiable with respect to x, gamma and beta, by the
        kernel of ``normalization_bwd``; straight through quantized values.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``normalization_fwd``.
    """
    op = "layernorm"
    kind = kind_of(op, norm_type)
    filled = check_weights(op, kind, x, gamma, beta)
    layout = QuantizeLayout.ROWWISE
    outputs = outputs_config(op, x, x.shape, 1, out_dtype, scaling_mode, layout, None, False)
    epsilon = check_epsilon(op, epsilon)
    config = NormConfig(kind, bool(zero_centered_gamma), epsilon, outputs)
    scale, amax = given_numbers(op, outputs, scale, None)
    return _LAYERNORM(config, x, scale, amax, gamma, filled)


def _reference(config: NormConfig, x: jax.Array, *rest: jax.Array) -> jax.Array:
    assert config.outputs is not None
    return config.outputs.straight(
        lambda outputs: forward(dataclasses.replace(config, outputs=outputs), x, *rest)
    )


def _forward(config: NormConfig, x: jax.Array, *rest: jax.Array) -> Any:
    assert config.outputs is not None
    found = FORWARD(config, x, *rest)
    return config.outputs.as_floats(found), (x, *found[5:], rest[2])


def _gradient(config: NormConfig, saved: Any, dz: jax.Array) -> Any:
    plain = NormConfig(config.norm_type, config.zero_centered_gamma)
    dx, dgamma, dbeta = BACKWARD(plain, dz, *saved)
    return dx, None, None, dgamma, dbeta if config.is_layer else None


_LAYERNORM = Op("layernorm", _reference, forward=_forward, gradient=_gradient)
