"""Ranges of tensors, and fake quantization to them.

What is done at one site is one jitted function, so that a model of many sites traces it once for
each shape.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

import quant_numerics as qn

from ._plan import ConstantUse, DynamicUse, Site, WeightUse


@dataclass(frozen=True)
class How:
    """How a tensor is quantized.

    Attributes:
        qtype: "int8" or "int16".
        method: the calibration method.
        batch_axes: axes of which the mean of the ranges is taken.
        symmetric: whether the range is symmetric.
        decay: of the moving average; None for the mean.
        fixed: the range, where it is given.
    """

    qtype: str
    method: str
    batch_axes: tuple[int, ...]
    symmetric: bool
    decay: float | None
    fixed: tuple[float, float] | None

    @classmethod
    def of(cls, site: Site, symmetric: bool, decay: float | None, batch: tuple[int, ...]) -> How:
        """Returns how a site's tensor is quantized; ``batch`` is for rules that say nothing."""
        symmetric = symmetric or site.is_symmetric
        axes = batch if site.batch_axes is None else site.batch_axes
        return cls(site.qtype, site.method, axes, symmetric, decay, site.fixed)


def calibration_of(row: jax.Array, decay: float | None, symmetric: bool) -> qn.Calibration:
    """Returns the average that a row of statistics stands for."""
    return _average(row[0], row[1], row[2], decay, symmetric)


def _average(
    lower: jax.Array, upper: jax.Array, count: jax.Array, decay: float | None, symmetric: bool
) -> qn.Calibration:
    weight = count if decay is None else 1.0 - jnp.float32(decay) ** count
    weight = lax.max(weight, jnp.float32(1.0) if decay is None else jnp.float32(1.0 - decay))
    return qn.Calibration(None if symmetric else lower / weight, upper / weight)


def _observed(x: jax.Array, how: How) -> tuple[jax.Array, jax.Array]:
    """Returns the bounds of a tensor, float32 of shape ().

    The mean over the batch axes of the extremes over the others. Under ``vmap`` the mapped axis
    is a batch axis too, and the range one for all of it.
    """
    batch = tuple(sorted({a % x.ndim for a in how.batch_axes if -x.ndim <= a < x.ndim}))
    return _bounds(lax.stop_gradient(x), how, batch)


def _bounds(x: jax.Array, how: How, batch: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    @jax.custom_batching.custom_vmap
    def find(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        found = qn.calibrate(x, how.qtype, channel_axes=batch, method=how.method)
        upper = found.upper.astype(jnp.float32)
        lower = -upper if found.lower is None else found.lower.astype(jnp.float32)
        if how.symmetric:
            upper = jnp.maximum(-lower, upper)
        upper = _mean(upper)
        return (-upper if how.symmetric or found.lower is None else _mean(lower)), upper

    @find.def_vmap
    def rule(size: int, batched: list[bool], x: jax.Array) -> tuple[Any, Any]:
        del size, batched  # it is called where the one argument is batched
        return _bounds(x, how, (0, *(axis + 1 for axis in batch))), (False, False)

    return find(x)


def _mean(x: jax.Array) -> jax.Array:
    return lax.reduce_sum(x, range(x.ndim)) / x.size if x.size != 1 else x.reshape(())


@functools.partial(jax.jit, static_argnums=(2, 3, 4))
def at_site(
    x: jax.Array, row: jax.Array, how: How, update: bool, quantize: bool
) -> tuple[jax.Array, jax.Array]:
    """Rounds a tensor to the codes of its range, and back.

    The derivative is that of clipping to the range (Bengio et al. 2013, arXiv:1308.3432, and
    section 3 of arXiv:1712.05877).

    Args:
        x: float array of any shape.
        row: the statistics of its site, float32[3].
        how: how it is quantized.
        update: whether its own range is added to them, before it is rounded.
        quantize: whether it is rounded.

    Returns:
        The tensor, and the statistics.
    """
    row = lax.stop_gradient(row)
    # Else XLA computes what made the tensor again for each of the minimum, the maximum, the codes
    # and the mask of the gradient.
    x = lax.optimization_barrier(x)
    if how.fixed is not None:
        lower, upper = map(jnp.float32, how.fixed)
        bounds = qn.Calibration(None if how.symmetric else lower, upper)
        return (_rounded(x, bounds, how.qtype) if quantize else x), row
    # Numbers, not vectors: XLA computes them where they are used.
    before = (row[0], row[1], row[2])
    seen = _observed(x, how)
    keep, add = (1.0, 1.0) if how.decay is None else (how.decay, 1.0 - how.decay)
    finite = lax.is_finite(seen[0]) & lax.is_finite(seen[1])
    # Without an update: where nothing was ever seen, as in the branch of a cond that was not
    # taken, the tensor's own range.
    wanted = finite if update else finite & (before[2] == 0)
    added = (keep * before[0] + add * seen[0], keep * before[1] + add * seen[1], before[2] + 1)
    lower, upper, count = map(functools.partial(lax.select, wanted), added, before)
    bounds = _average(lower, upper, count, how.decay, how.symmetric)
    out = _rounded(x, bounds, how.qtype) if quantize else x
    return out, jnp.stack([lower, upper, count]) if update else row


@functools.partial(jax.custom_jvp, nondiff_argnums=(2,))
def _rounded(x: jax.Array, bounds: qn.Calibration, qtype: str) -> jax.Array:
    shaped = jax.tree.map(lambda bound: bound.reshape((1,) * x.ndim), bounds)
    scale, zero_point, outer = qn.scale_of(shaped, qtype)
    return qn.dequantize(qn.quantize_with(x, qtype, scale, zero_point, outer))


@_rounded.defjvp
def _rounded_jvp(qtype: str, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, bounds), tangent = primals, tangents[0]
    lower, upper = bounds
    lower = -upper if lower is None else lower
    inside = (x >= lower.astype(x.dtype)) & (x <= upper.astype(x.dtype))
    return _rounded(x, bounds, qtype), lax.select(inside, tangent, lax.full_like(tangent, 0))


@functools.partial(jax.jit, static_argnums=(1,))
def fake_quant_weight(x: jax.Array, use: WeightUse) -> jax.Array:
    """Rounds a parameter to the codes of its own ranges, straight through."""
    return qn.fake_quant(x, use.qtype, channel_axes=use.channel_axes, method=use.method)


@functools.partial(jax.jit, static_argnums=(1,))
def fake_quant_constant(x: jax.Array, use: ConstantUse) -> jax.Array:
    """Rounds a constant to the codes of its own range, straight through."""
    method = "minmax" if use.qtype == "int8" else "absmax"
    return qn.fake_quant(x, use.qtype, method=method)


@functools.partial(jax.jit, static_argnums=(1,))
def fake_quant_dynamic(x: jax.Array, use: DynamicUse) -> jax.Array:
    """Rounds the rows of an activation to the codes of their own ranges, straight through.

    With a zero point for each row, as LiteRT's XNNPACK kernels (``qd8``) do.
    """
    return qn.fake_quant(x, "int8", channel_axes=use.channel_axes, method="minmax")
