"""Activations and their gradients, quantized on request; and as a layer of a model uses them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..op import Op
from ..partition import partition_rows
from ..quantize.modes import QuantizeLayout, ScalingMode
from ..quantize.outputs import Outputs, given_numbers, outputs_config
from . import reference
from .config import ActivationConfig, ActivationParams, check_dz, check_x, names_of, params_of


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
    """Return an activation, plain or gated, quantized in the same pass.

    With two names, such as ``("silu", "linear")``, the result is the first function of ``x[..., 0,
    :]`` times the second of ``x[..., 1, :]``. In float32; gelu is in its form with tanh. The name
    and the first arguments are Transformer Engine's; those from `out_dtype` on stand for its
    quantizer, and are as in ``normalization_fwd``.

    Args:
        x: float32, bfloat16 or float16, of shape (..., 1, n), or (..., 2, n) with two names.
        activation_type: a key of ``ActivationEnum``: "gelu", "silu", "relu", "quick_gelu" or
            "squared_relu", alone or with "linear"; ``("sigmoid", "linear")``;
            ``("clamped_silu", "clamped_linear")``.
        act_params: parameters of the last one; None for the defaults.
        out_dtype: dtype of quantized values: float8_e4m3fn (the default), float8_e5m2, or (ours)
            int8, which MXFP8 doesn't have. Without scaling, x's.
        scaling_mode: a ``ScalingMode`` or its number.
        q_layout: a ``QuantizeLayout`` or its number.
        scale: float32[1], used with DELAYED_TENSOR_SCALING.
        amax: float32[1]: the largest magnitude so far; None for 0.
        scale_dtype: as in ``dbias_quantize``.
        output_amax_when_no_scaling: whether `updated_amax` is computed without scaling, too.

    Returns:
        ``(output, colwise_output, scale_inv, colwise_scale_inv, updated_amax)`` of an array of
        shape (..., n), as ``normalization_fwd`` has them.

    Differentiable with respect to x, by the kernel of ``dact_lu``; straight through quantized
    values.

    Raises:
        TypeError: a dtype that isn't taken.
        ValueError: shapes, modes, layouts or an activation that can't be.
        NotImplementedError: NVFP4.
    """
    op = "act_lu"
    names = names_of(op, activation_type)
    shape = check_x(op, names, x)
    outputs = outputs_config(
        op, x, shape, 1, out_dtype, scaling_mode, q_layout, scale_dtype,
        output_amax_when_no_scaling,
    )  # fmt: skip
    config = ActivationConfig(names, params_of(op, act_params), outputs)
    scale, amax = given_numbers(op, outputs, scale, amax)
    return FORWARD(config, x, scale, amax)


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
    """Return an activation's gradient, quantized on request, and its bias sums.

    At its limit, a clamped part has the derivative of the inside, as in Transformer Engine. Here
    every activation and mode can have sums.

    Args:
        dz: cotangent of the result of ``act_lu``: of its shape (..., n) and of x's dtype.
        is_dbias: whether to sum dx over rows, in float32: as it's computed, or with
            CURRENT_TENSOR_SCALING rounded to x's dtype.

    The other arguments are those of ``act_lu``.

    Returns:
        ``(output, colwise_output, scale_inv, colwise_scale_inv, updated_amax, dbias)`` of dx, in
        the shape of x, whose last two axes are its columns (``flatten_axis=-2`` of
        ``dbias_quantize``). dbias is of x's dtype and of shape ``x.shape[-2:]``; zeros of shape
        (1,) where it isn't wanted. Differentiable, in plain JAX.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``act_lu``.
    """
    op = "quantize_dact_dbias"
    names = names_of(op, activation_type)
    check_dz(op, names, dz, x)
    outputs = outputs_config(
        op, x, x.shape, 2, out_dtype, scaling_mode, q_layout, scale_dtype,
        output_amax_when_no_scaling,
    )  # fmt: skip
    config = ActivationConfig(names, params_of(op, act_params), outputs, bool(is_dbias))
    scale, amax = given_numbers(op, outputs, scale, amax)
    return _BACKWARD(config, dz, x, scale, amax)


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
    """Return the gradient of an activation: ``quantize_dact_dbias`` without the sums.

    The arguments are those of ``quantize_dact_dbias``.

    Returns:
        ``(output, colwise_output, scale_inv, colwise_scale_inv, updated_amax)`` of dx.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``act_lu``.
    """
    return quantize_dact_dbias(
        dz, x, activation_type, False, act_params, out_dtype, scaling_mode, q_layout, scale, amax,
        scale_dtype, output_amax_when_no_scaling,
    )[:5]  # fmt: skip


def plain_gradient(config: ActivationConfig, dz: jax.Array, x: jax.Array) -> jax.Array:
    """Return dx in x's dtype, not quantized, by the kernel."""
    plain = dataclasses.replace(config, outputs=Outputs(x.dtype, 2, x.dtype), is_dbias=False)
    one = jnp.ones((1,), jnp.float32)
    return _BACKWARD(plain, dz, x, one, 0 * one)[0]


def _partition(config: ActivationConfig, block: Any, *operands: jax.Array) -> Any:
    """Share out elements but gate parts, unless a scale spans several."""
    *dz, x, _, _ = operands
    run = functools.partial(block, config)
    names = [f"axis{i}" for i in range(x.ndim - 1)]
    with_parts = [*names[:-1], "parts", names[-1]]
    found = config.outputs.axes(with_parts if dz else names)
    if found is None or config.is_dbias:
        return run
    given = [*(names for _ in dz), with_parts, ["scale"], ["amax"]]
    found += [["dbias"], ["workspace"]] if dz else []
    whole = {name for one in (*given, *found) for name in one if not name.startswith("axis")}
    return partition_rows(run, given, found, whole)


def _batch(run: Any, config: ActivationConfig, size: int, batched: Any, *operands: Any) -> Any:
    """Fold a batch into rows, unless a scale spans all rows."""
    rows = all(batched[:-2]) and not any(batched[-2:])
    if not rows or config.is_dbias or not config.outputs.follows_rows:
        return NotImplemented
    of_dbias = (False,) * (len(operands) - 3)
    return run(config, *operands), (*config.outputs.of_rows, *of_dbias)


def _forward_gradient(config: ActivationConfig, saved: Any, cts: Any) -> Any:
    x, scale_inv, colwise_scale_inv = saved
    shape = (*x.shape[:-2], x.shape[-1])
    dz = config.outputs.cotangent(shape, scale_inv, colwise_scale_inv, cts)
    return plain_gradient(config, dz.astype(x.dtype), x), None, None


FORWARD = Op(
    "act_lu",
    reference.forward,
    results=lambda config, x, *_: config.outputs.results((*x.shape[:-2], x.shape[-1])),
    attributes=lambda config, *_: config.attributes(),
    partition=_partition,
    batch=_batch,
    save=lambda config, operands, found: (operands[0], *found[2:4]),
    gradient=_forward_gradient,
)


def _backward_gradient(config: ActivationConfig, saved: Any, cts: Any) -> Any:
    dz, x, scale_inv, colwise_scale_inv = saved
    ct = config.outputs.cotangent(x.shape, scale_inv, colwise_scale_inv, cts)
    ct = ct.astype(jnp.float32)
    if config.is_dbias:
        ct = ct + jnp.broadcast_to(cts[5].astype(jnp.float32), x.shape)
    _, pull = jax.vjp(functools.partial(reference.derivative, config), dz, x)
    return *pull(ct), None, None


_BACKWARD = Op(
    "dact_dbias_quantize",
    reference.backward,
    results=lambda config, dz, x, *_: (*config.outputs.results(x.shape), config.dbias_result(x)),
    attributes=lambda config, *_: config.attributes() | {"is_dbias": config.is_dbias},
    workspace=lambda *_: jax.ShapeDtypeStruct((1,), jnp.float32),
    partition=_partition,
    batch=_batch,
    save=lambda config, operands, found: (*operands[:2], *found[2:4]),
    gradient=_backward_gradient,
)


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


def _layer_reference(config: ActivationConfig, *operands: jax.Array) -> jax.Array:
    return config.outputs.straight(
        lambda outputs: reference.forward(dataclasses.replace(config, outputs=outputs), *operands)
    )


def _layer_forward(config: ActivationConfig, x: jax.Array, *rest: jax.Array) -> Any:
    return config.outputs.as_floats(FORWARD(config, x, *rest)), x


def _layer_gradient(config: ActivationConfig, x: jax.Array, dz: jax.Array) -> Any:
    return plain_gradient(config, dz, x), None, None


_ACTIVATION = Op("activation", _layer_reference, forward=_layer_forward, gradient=_layer_gradient)
