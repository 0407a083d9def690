"""grouped_quantize: groups of rows, each with scales of its own."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from .. import _op
from . import checks, reference_quantize
from .configs import QuantizeConfig, quantize_config
from .cotangents import nothing


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
    """Quantizes groups of x one by one, as ``dbias_quantize`` does with one array.

    The arguments are those of Transformer Engine's primitive. Groups are of x's first axis, one
    after the other; the axes from there to `flatten_axis` are rows of theirs.

    Args:
        x: float32, bfloat16 or float16, of 2 or more axes.
        scale: float32[groups]; used per tensor.
        group_sizes: int32[groups], with the sum ``x.shape[0]``.
        out_dtype: float8_e4m3fn, float8_e5m2, or (ours) int8, which MXFP8 hasn't.
        scaling_mode: a ``ScalingMode`` or its number.
        q_layout: a ``QuantizeLayout`` or its number.
        flatten_axis: the first axis that is columns.
        scale_dtype: float32; for MXFP8 float8_e8m0fnu, or uint8 with the same bits.

    Returns:
        ``(out, colwise_out, scale_inv, colwise_scale_inv, updated_amax)``, all flat: the results of
        the groups one after the other, codes by column transposed within each group (not with
        MXFP8). There is a scale for each group, empty ones too. `updated_amax` is float32[groups]:
        per tensor the largest magnitude of each group, else 0. What isn't wanted has shape (1,).

    There is no gradient.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``dbias_quantize``.
        jax.errors.JaxRuntimeError: when it runs: negative groups, another sum, or MXFP8 by column
            with groups that aren't multiples of 32 rows. On CUDA, where nobody waits for what the
            sizes are, all scales and magnitudes are NaN then. (The reference can't tell.)
    """
    op = "grouped_quantize"
    config = quantize_config(
        op, x, out_dtype, scaling_mode, q_layout, flatten_axis, scale_dtype, grouped=True
    )
    checks.dtype(op, "group_sizes", group_sizes.dtype, (jnp.int32,))
    if group_sizes.ndim != 1:
        raise ValueError(f"{op}: group_sizes has shape {group_sizes.shape}, and must have one axis")
    if config.scaling_mode.is_tensor:
        checks.dtype(op, "scale", scale.dtype, (jnp.float32,))
        checks.shape(op, "scale", scale, group_sizes.shape, "one for each of group_sizes")
    return _run(config, x, jnp.asarray(scale), group_sizes)


def _kernel(
    config: QuantizeConfig, x: jax.Array, scale: jax.Array, group_sizes: jax.Array
) -> tuple[jax.Array, ...]:
    return _op.call(
        "grouped_quantize",
        functools.partial(reference_quantize.grouped, config),
        (x, scale, group_sizes),
        config.grouped_results(x, group_sizes.shape[0]),
        scaling_mode=int(config.scaling_mode),
        q_layout=int(config.q_layout),
        flatten_axis=config.axis,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(config: QuantizeConfig, *args: jax.Array) -> tuple[jax.Array, ...]:
    return _op.batched(functools.partial(_kernel, config))(*args)


def _forward(config: QuantizeConfig, *args: jax.Array) -> Any:
    return _differentiable(config, *args), args


def _backward(config: QuantizeConfig, saved: Any, cts: Any) -> Any:
    return nothing(saved)


_differentiable.defvjp(_forward, _backward)
_run = jax.jit(_differentiable, static_argnums=0)
