"""activation: an activation as a layer of a model uses it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from ..op import Op
from ..quantize.modes import QuantizeLayout, ScalingMode
from ..quantize.outputs import given_numbers, outputs_config
from .config import (
    ActivationConfig,
    ActivationParams,
    check_x,
)
from .config import (
    activation_type as names_of,
)
from .config import (
    params as params_of,
)
from .op import FORWARD, plain_gradient
from .reference import forward


def activation(
    x: jax.Array,
    activation_type: str | Sequence[str] = ("gelu",),
    act_params: ActivationParams | None = None,
    out_dtype: DTypeLike | None = None,
    scaling_mode: Any = ScalingMode.NO_SCALING,
    scale: jax.Array | None = None,
) -> jax.Array:
    """Return an activation, plain or gated, as Transformer Engine's ``activation``.

    With a scaling mode the result is quantized by row, and dequantized: what training sees of a
    quantized activation. The last three arguments stand for Transformer Engine's quantizer.

    Args:
        x: float32, bfloat16 or float16, of shape (..., 1, n), or (..., 2, n) for a gated one.
        activation_type: see ``act_lu``.
        act_params: parameters of ``("clamped_silu", "clamped_linear")``; None for the defaults.
        out_dtype: dtype of the quantized values; see ``act_lu``.
        scaling_mode: a ``ScalingMode`` or its number.
        scale: float32[1], used with DELAYED_TENSOR_SCALING.

    Returns:
        An array of shape (..., n) and x's dtype. Differentiable with respect to x, by the kernel
        of ``dact_lu``; straight through quantized values.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``act_lu``.
    """
    op = "activation"
    names = names_of(op, activation_type)
    shape = check_x(op, names, x)
    layout = QuantizeLayout.ROWWISE
    outputs = outputs_config(op, x, shape, 1, out_dtype, scaling_mode, layout, None, False)
    config = ActivationConfig(names, params_of(op, act_params), outputs)
    scale, amax = given_numbers(op, outputs, scale, None)
    return _ACTIVATION(config, x, scale, amax)


def _reference(config: ActivationConfig, *operands: jax.Array) -> jax.Array:
    return config.outputs.straight(
        lambda outputs: forward(dataclasses.replace(config, outputs=outputs), *operands)
    )


def _forward(config: ActivationConfig, x: jax.Array, *rest: jax.Array) -> Any:
    return config.outputs.as_floats(FORWARD(config, x, *rest)), x


def _gradient(config: ActivationConfig, x: jax.Array, dz: jax.Array) -> Any:
    return plain_gradient(config, dz, x), None, None


_ACTIVATION = Op("activation", _reference, forward=_forward, gradient=_gradient)
