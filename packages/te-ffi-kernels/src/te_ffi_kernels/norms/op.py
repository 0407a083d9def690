"""Norms with their statistics, and their gradient; and as a layer of a model uses them."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from ..op import Op, gradient_of
from ..partition import partition_rows
from ..quantize.modes import QuantizeLayout, ScalingMode
from ..quantize.outputs import given_numbers, outputs_config
from . import reference
from .config import NormConfig, check_backward, check_epsilon, check_weights, kind_of


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
    """Norm the rows of an array, and optionally quantize the result.

    ``(x - mu) * rsigma * gamma + beta`` along the last axis, in float32; for "rmsnorm" without mu
    and beta. The name and the first arguments are Transformer Engine's; the others, which stand
    for its quantizer, are those of ``dbias_quantize``.

    Args:
        x: float32, bfloat16 or float16, of shape (..., n).
        gamma: of x's dtype or float32, of shape (n,).
        beta: as gamma; not used by "rmsnorm", where it may be None.
        zero_centered_gamma: whether 1 is added to gamma, in float32.
        epsilon: what is added to the variance (or mean square).
        norm_type: "layernorm" or "rmsnorm".
        out_dtype: dtype of quantized values: float8_e4m3fn (the default), float8_e5m2, or (ours)
            int8, which MXFP8 doesn't have. Without scaling, x's.
        scaling_mode: a ``ScalingMode`` or its number. With CURRENT_TENSOR_SCALING the scale is
            computed from the largest magnitude of the result, which is rounded to x's dtype
            before, as if it had been stored.
        q_layout: a ``QuantizeLayout`` or its number.
        scale: float32[1], used with DELAYED_TENSOR_SCALING.
        amax: float32[1]: the largest magnitude so far; None for 0.
        scale_dtype: as in ``dbias_quantize``.
        output_amax_when_no_scaling: whether `updated_amax` is computed without scaling, too.

    Returns:
        ``(output, colwise_output, scale_inv, colwise_scale_inv, updated_amax, mu, rsigma)``: the
        first five as those of ``dbias_quantize`` (with ``flatten_axis=-1``), of floats in x's
        dtype without scaling; mu and rsigma in float32 of shape ``x.shape[:-1]``. Results that the
        norm or the mode doesn't have are zeros of shape (1,), such as mu of "rmsnorm".

    Differentiable with respect to x, gamma and beta; straight through quantized values, as
    ``dbias_quantize``.

    Raises:
        TypeError: a dtype that isn't taken.
        ValueError: shapes, modes, layouts or a norm that can't be.
        NotImplementedError: NVFP4.
    """
    op = "normalization_fwd"
    kind = kind_of(op, norm_type)
    beta = check_weights(op, kind, x, gamma, beta)
    outputs = outputs_config(
        op, x, x.shape, 1, out_dtype, scaling_mode, q_layout, scale_dtype,
        output_amax_when_no_scaling,
    )  # fmt: skip
    epsilon = check_epsilon(op, epsilon)
    config = NormConfig(kind, bool(zero_centered_gamma), epsilon, outputs)
    scale, amax = given_numbers(op, outputs, scale, amax)
    return FORWARD(config, x, scale, amax, gamma, beta)


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
    """Return the gradient of a norm. Arguments as Transformer Engine's.

    Args:
        dz: cotangent of the result, of x's shape and dtype.
        x: as for ``normalization_fwd``.
        mu: the means of ``normalization_fwd``; not used by "rmsnorm", where it may be None.
        rsigma: float32, as ``normalization_fwd`` gives it.
        gamma: as for ``normalization_fwd``.
        beta: not used.
        zero_centered_gamma: as for ``normalization_fwd``.
        epsilon: not used.
        norm_type: "layernorm" or "rmsnorm".

    Returns:
        ``(dx, dgamma, dbeta)``: of x, and summed over rows in float32, of gamma's dtype; dbeta of
        "rmsnorm" is None. Sums are in an order that depends on the shape alone. Differentiable,
        in plain JAX.

    Raises:
        TypeError: a dtype that isn't taken.
        ValueError: shapes that don't go together, or an unknown norm.
    """
    op = "normalization_bwd"
    kind = kind_of(op, norm_type)
    check_weights(op, kind, x, gamma, gamma if beta is None else beta)
    check_epsilon(op, epsilon)
    mu = check_backward(op, kind, dz, x, mu, rsigma)
    config = NormConfig(kind, bool(zero_centered_gamma))
    dx, dgamma, dbeta = BACKWARD(config, dz, x, mu, rsigma, gamma)
    return dx, dgamma, dbeta if config.is_layer else None


def _forward_workspace(config: NormConfig, x: jax.Array, *_: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape[:-1] if config.has_workspace else (1,), jnp.float32)


def _forward_partition(config: NormConfig, block: Any, x: jax.Array, *_: jax.Array) -> Any:
    """Share out rows, unless a scale or maximum is of all."""
    assert config.outputs is not None
    run = functools.partial(block, config)
    rows = [f"row{i}" for i in range(x.ndim - 1)]
    found = config.outputs.axes([*rows, "n"])
    if not rows or found is None:
        return run
    weights = [["n"], ["n"] if config.is_layer else ["beta"]]
    given = [[*rows, "n"], ["scale"], ["amax"], *weights]
    workspace = rows if config.has_workspace else ["workspace"]
    found += [rows if config.is_layer else ["mu"], rows, workspace]
    return partition_rows(run, given, found, _whole(given, found))


def _whole(given: list[list[str]], found: list[list[str]]) -> set[str]:
    """Return the axes that are not rows."""
    return {name for names in (*given, *found) for name in names if not name.startswith("row")}


def _forward_batch(run: Any, config: NormConfig, size: int, batched: Any, *operands: Any) -> Any:
    """Fold a batch into rows, unless a scale spans all rows."""
    assert config.outputs is not None
    if batched != (True, False, False, False, False) or not config.outputs.follows_rows:
        return NotImplemented
    return run(config, *operands), (*config.outputs.of_rows, config.is_layer, True)


def _forward_gradient(config: NormConfig, saved: Any, cts: Any) -> Any:
    assert config.outputs is not None
    x, gamma, scale_inv, colwise_scale_inv, mu, rsigma = saved
    dz = config.outputs.cotangent(x.shape, scale_inv, colwise_scale_inv, cts).astype(x.dtype)
    plain = NormConfig(config.norm_type, config.zero_centered_gamma)
    dx, dgamma, dbeta = BACKWARD(plain, dz, x, mu, rsigma, gamma)
    # mu and rsigma are results, too: their cotangents add to dx.
    rest = x.astype(jnp.float32) - mu[..., None] if config.is_layer else x.astype(jnp.float32)
    more = -cts[6][..., None] * rsigma[..., None] ** 3 * rest
    if config.is_layer:
        more = more + cts[5][..., None]
    dx = (dx.astype(jnp.float32) + more / x.shape[-1]).astype(x.dtype)
    return dx, None, None, dgamma, dbeta if config.is_layer else None


FORWARD = Op(
    "norm_forward",
    reference.forward,
    results=lambda config, x, *_: config.forward_results(x),
    attributes=lambda config, *_: config.attributes(),
    workspace=_forward_workspace,
    partition=_forward_partition,
    batch=_forward_batch,
    save=lambda config, operands, found: (operands[0], operands[3], *found[2:4], *found[5:]),
    gradient=_forward_gradient,
)


def _backward_partition(config: NormConfig, block: Any, dz: jax.Array, *operands: jax.Array) -> Any:
    """Share out rows; the gradients of the weights are sums over them."""
    run = functools.partial(block, config)
    rows = [f"row{i}" for i in range(dz.ndim - 1)]
    if not rows:
        return run
    x, mu = [*rows, "n"], rows if config.is_layer else ["mu"]
    given = [x, x, mu, rows, ["n"]]
    found = [x, ["n"], ["n"] if config.is_layer else ["beta"], ["workspace"]]
    sums = (1, 2) if config.is_layer else (1,)
    return partition_rows(run, given, found, _whole(given, found), sums)


BACKWARD = Op(
    "norm_backward",
    reference.backward,
    results=lambda config, dz, x, mu, rsigma, gamma: config.backward_results(x, gamma),
    attributes=lambda config, *_: config.attributes(),
    workspace=lambda *_: jax.ShapeDtypeStruct((1,), jnp.float32),
    partition=_backward_partition,
    gradient=gradient_of(reference.backward),
)


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


def _layer_reference(config: NormConfig, x: jax.Array, *rest: jax.Array) -> jax.Array:
    assert config.outputs is not None
    return config.outputs.straight(
        lambda outputs: reference.forward(dataclasses.replace(config, outputs=outputs), x, *rest)
    )


def _layer_forward(config: NormConfig, x: jax.Array, *rest: jax.Array) -> Any:
    assert config.outputs is not None
    found = FORWARD(config, x, *rest)
    return config.outputs.as_floats(found), (x, *found[5:], rest[2])


def _layer_gradient(config: NormConfig, saved: Any, dz: jax.Array) -> Any:
    plain = NormConfig(config.norm_type, config.zero_centered_gamma)
    dx, dgamma, dbeta = BACKWARD(plain, dz, *saved)
    return dx, None, None, dgamma, dbeta if config.is_layer else None


_LAYERNORM = Op("layernorm", _layer_reference, forward=_layer_forward, gradient=_layer_gradient)
