"""act_lu, dact_lu and quantize_dact_dbias: activations and their gradients, floats or codes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import _op
from .._rows import partition_rows
from .._te.modes import QuantizeLayout, ScalingMode
from .._te.outputs import Outputs, given_numbers, outputs_config
from . import reference
from .config import (
    ActivationConfig,
    ActivationParams,
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
    """An activation, plain or gated, whose result may be quantized in the same pass.

    With two names, such as ``("silu", "linear")``, the result is the first function of ``x[..., 0,
    :]`` times the second of ``x[..., 1, :]``. In float32; gelu is in its form with tanh. The name
    and the first arguments are Transformer Engine's; those from `out_dtype` on stand for its
    quantizer, and are as in ``normalization_fwd``.

    Args:
        x: float32, bfloat16 or float16, of shape (..., 1, n), or (..., 2, n) with two names.
        activation_type: a key of ``ActivationEnum``: "gelu", "silu", "relu", "quick_gelu" or
            "squared_relu", alone or with "linear"; ``("sigmoid", "linear")``;
            ``("clamped_silu", "clamped_linear")``.
        act_params: of the last.
        out_dtype: of codes: float8_e4m3fn (the default), float8_e5m2, or (ours) int8, which MXFP8
            hasn't. Without scaling, x's.
        scaling_mode: a ``ScalingMode`` or its number.
        q_layout: a ``QuantizeLayout`` or its number.
        scale: float32[1], used with DELAYED_TENSOR_SCALING.
        amax: float32[1]: the largest magnitude so far; 0 where it isn't given.
        scale_dtype: as in ``dbias_quantize``.
        output_amax_when_no_scaling: whether `updated_amax` is made without scaling, too.

    Returns:
        ``(output, colwise_output, scale_inv, colwise_scale_inv, updated_amax)`` of an array of
        shape (..., n), as ``normalization_fwd`` has them.

    Differentiable with respect to x, by the kernel of ``dact_lu``; straight through codes.

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
    return run_forward(config, *_op.alike(x, scale, amax))


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
    """The gradient of an activation, quantized where it's wanted, and its sums for a bias.

    Where a clamped part is at its limit its derivative is that of the inside, as in Transformer
    Engine. Sums go with every activation and mode here.

    Args:
        dz: cotangent of the result of ``act_lu``: of its shape (..., n) and of x's dtype.
        x: as for ``act_lu``.
        activation_type: as for ``act_lu``.
        is_dbias: whether to sum dx over rows, in float32: as it's computed, or with
            CURRENT_TENSOR_SCALING rounded to x's dtype.
        act_params: as for ``act_lu``.
        out_dtype: as for ``act_lu``.
        scaling_mode: as for ``act_lu``.
        q_layout: as for ``act_lu``.
        scale: as for ``act_lu``.
        amax: as for ``act_lu``.
        scale_dtype: as for ``act_lu``.
        output_amax_when_no_scaling: as for ``act_lu``.

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
    return run_backward(config, *_op.alike(dz, x, scale, amax))


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
    """The gradient of an activation: ``quantize_dact_dbias`` without the sums.

    Args:
        dz: as for ``quantize_dact_dbias``, like what follows.
        x: as there.
        activation_type: as there.
        act_params: as there.
        out_dtype: as there.
        scaling_mode: as there.
        q_layout: as there.
        scale: as there.
        amax: as there.
        scale_dtype: as there.
        output_amax_when_no_scaling: as there.

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
    """dx in x's dtype, whatever is made of the result."""
    plain = dataclasses.replace(config, outputs=Outputs(x.dtype, 2, x.dtype), is_dbias=False)
    one = jnp.ones((1,), jnp.float32)
    return run_backward(plain, dz, x, one, 0 * one)[0]


def _forward_kernel(config: ActivationConfig, *operands: jax.Array) -> tuple[jax.Array, ...]:
    def results(x: jax.Array, *rest: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
        return config.outputs.results((*x.shape[:-2], x.shape[-1]))

    attributes = config.attributes()
    return _op.call(
        "act_lu",
        functools.partial(reference.forward, config),
        operands,
        results(*operands),
        partition=_partition(config, False, results, operands[0].ndim, attributes),
        **attributes,
    )


def _partition(
    config: ActivationConfig, is_gradient: bool, results: Any, ndim: int, attributes: dict[str, Any]
) -> Any:
    """Elements are shared out where nothing is of several, but for the parts of a gate."""
    names = [f"axis{i}" for i in range(ndim - 1)]
    x = [*names[:-1], "parts", names[-1]]
    found = config.outputs.axes(x if is_gradient else names)
    if found is None or config.is_dbias:
        return None
    given = [*([names] if is_gradient else []), x, ["scale"], ["amax"]]
    found += [["dbias"], ["workspace"]] if is_gradient else []
    whole = {name for one in (*given, *found) for name in one if not name.startswith("axis")}
    return partition_rows(given, found, whole, results, attributes)


def _forward_batch(config: ActivationConfig, size: int, batched: Any, *operands: jax.Array) -> Any:
    """Rows of a batch are rows, unless something is of all rows of one element."""
    del size
    if list(batched) != [True, False, False] or not config.outputs.follows_rows:
        return NotImplemented
    return _batched_forward(config)(*operands), config.outputs.of_rows


@functools.cache
def _batched_forward(config: ActivationConfig) -> Any:
    rule = functools.partial(_forward_batch, config)
    return _op.batched(functools.partial(_forward_kernel, config), rule)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _forward(config: ActivationConfig, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return _batched_forward(config)(*operands)


def _forward_rule(config: ActivationConfig, *operands: jax.Array) -> Any:
    found = run_forward(config, *operands)
    return found, (operands[0], found[2], found[3])


def _forward_transposed(config: ActivationConfig, saved: Any, cts: Any) -> Any:
    x, scale_inv, colwise_scale_inv = saved
    shape = (*x.shape[:-2], x.shape[-1])
    dz = config.outputs.cotangent(shape, scale_inv, colwise_scale_inv, cts)
    return plain_gradient(config, dz.astype(x.dtype), x), None, None


_forward.defvjp(_forward_rule, _forward_transposed)
run_forward = jax.jit(_forward, static_argnums=0)


def _backward_kernel(config: ActivationConfig, *operands: jax.Array) -> tuple[jax.Array, ...]:
    def in_jax(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return (*reference.backward(config, *operands), jnp.zeros((1,), jnp.float32))

    def results(dz: jax.Array, x: jax.Array, *rest: jax.Array) -> tuple[jax.ShapeDtypeStruct, ...]:
        found = (*config.outputs.results(x.shape), config.dbias_result(x))
        return (*found, jax.ShapeDtypeStruct((1,), jnp.float32))

    attributes = config.attributes() | {"is_dbias": config.is_dbias}
    return _op.call(
        "dact_dbias_quantize",
        in_jax,
        operands,
        results(*operands),
        partition=_partition(config, True, results, operands[1].ndim, attributes),
        **attributes,
    )[:-1]


def _backward_batch(config: ActivationConfig, size: int, batched: Any, *operands: jax.Array) -> Any:
    del size
    rows = list(batched) == [True, True, False, False]
    if not rows or config.is_dbias or not config.outputs.follows_rows:
        return NotImplemented
    return _batched_backward(config)(*operands), (*config.outputs.of_rows, False)


@functools.cache
def _batched_backward(config: ActivationConfig) -> Any:
    rule = functools.partial(_backward_batch, config)
    return _op.batched(functools.partial(_backward_kernel, config), rule)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _backward(config: ActivationConfig, *operands: jax.Array) -> tuple[jax.Array, ...]:
    return _batched_backward(config)(*operands)


def _backward_rule(config: ActivationConfig, *operands: jax.Array) -> Any:
    found = _backward(config, *operands)
    return found, (operands[:2], found[2], found[3])


def _backward_transposed(config: ActivationConfig, saved: Any, cts: Any) -> Any:
    (dz, x), scale_inv, colwise_scale_inv = saved
    ct = config.outputs.cotangent(x.shape, scale_inv, colwise_scale_inv, cts)
    ct = ct.astype(jnp.float32)
    if config.is_dbias:
        ct = ct + jnp.broadcast_to(cts[5].astype(jnp.float32), x.shape)
    _, pull = jax.vjp(functools.partial(reference.derivative, config), dz, x)
    return *pull(ct), None, None


_backward.defvjp(_backward_rule, _backward_transposed)
run_backward = jax.jit(_backward, static_argnums=0)
