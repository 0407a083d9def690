"""Ranges of activations, and fake quantization to them.

What is done at one site is one jitted function, so that a model of many sites traces it once for
each shape.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn
from interception_core import KernelSpec, declared_specs, get_op

from ..decide.decision import Site
from .once import traced_once


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
        """Return how a site's tensor is quantized."""
        symmetric = symmetric or site.is_symmetric
        axes = batch if site.batch_axes is None else site.batch_axes
        return cls(site.qtype, site.method, axes, symmetric, decay, site.fixed)

    def axes_of(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the batch axes of a tensor of a shape, from 0 on."""
        axes, ndim = self.batch_axes, len(shape)
        return _of_examples(
            shape, tuple(sorted({axis % ndim for axis in axes if -ndim <= axis < ndim}))
        )

    def is_fused(self, axes: tuple[int, ...], dtype: Any) -> bool:
        """Return whether the op ``fake_quantize`` does the same, for a tensor's batch axes."""
        if self.fixed is not None or dtype not in _FLOATS or axes != tuple(range(len(axes))):
            return False
        return self.method == "minmax" or (self.method == "absmax" and self.symmetric)


_FLOATS = tuple(map(jnp.dtype, (jnp.float32, jnp.bfloat16, jnp.float16)))


def fused_op() -> Callable[..., Any] | None:
    """Return the op of an installed package that does a site in one call, or None."""
    found = any(spec.op == "fake_quantize" and spec.apply for spec in declared_specs(KernelSpec))
    return get_op("fake_quantize") if found else None


def _of_examples(shape: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return the batch axes of a tensor; none if each example is one number.

    The mean of the extremes of such examples is the mean of the numbers, which does not hold them:
    half of the outputs of a regression would be cut off.
    """
    return () if math.prod(shape[axis] for axis in batch) == math.prod(shape) else batch


def _bounds(x: jax.Array, how: How, batch: tuple[int, ...]) -> jax.Array:
    """Return the bounds of a tensor, float32[2].

    The mean over the batch axes of the extremes over the others. Under ``vmap`` the mapped axis
    is a batch axis too, and the range one for all of it.
    """

    @jax.custom_batching.custom_vmap
    def find(x: jax.Array) -> jax.Array:
        lower, upper = _extremes(x, how, batch)
        if how.symmetric:
            upper = jnp.maximum(-lower, upper)
            lower = -upper
        return _mean(lax.concatenate([lower.reshape(1, -1), upper.reshape(1, -1)], 0))

    @find.def_vmap
    def rule(size: int, batched: list[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        del size, batched  # it is called where the one argument is batched
        axes = _of_examples(x.shape, (0, *(axis + 1 for axis in batch)))
        return _bounds(x, how, axes), False

    return find(x)


def _extremes(x: jax.Array, how: How, batch: tuple[int, ...]) -> tuple[jax.Array, jax.Array]:
    """Return the bounds of each index of the batch axes, float32."""
    calibration = qn.calibrate(x, how.qtype, channel_axes=batch, method=how.method)
    upper = calibration.upper.astype(jnp.float32)
    lower = -upper if calibration.lower is None else calibration.lower.astype(jnp.float32)
    return lower, upper


def _mean(x: jax.Array) -> jax.Array:
    """Return the means of the rows of a matrix."""
    return lax.reduce_sum(x * np.float32(1 / x.shape[1]), (1,))


@traced_once(3, 4, 5, 7)
def at_site(
    x: jax.Array,
    terms: jax.Array,
    row: jax.Array | int,
    how: How,
    observe: bool,
    quantize: bool,
    seen: jax.Array | None = None,
    joined: bool = False,
) -> tuple[jax.Array, jax.Array | None]:
    """Round a tensor to the quantized values of its range.

    The derivative is that of clipping to the range (Bengio et al. 2013, arXiv:1308.3432, and
    section 3 of arXiv:1712.05877).

    Args:
        x: float array of any shape.
        terms: of the statistics of all sites before this call, float32[rows, 5, 2]: see
            ``terms_of``.
        row: which row is that of its site, int32.
        how: how it is quantized.
        observe: whether its own range is added to them, before it is rounded.
        quantize: whether it is rounded.
        seen: the bounds that this call has seen, float32[rows, 2]; not finite at a site where it
            has seen none. Must be given to observe.
        joined: whether the tensor's own are joined with those of its site.

    Returns:
        The tensor; and the bounds that this call has seen, with its own if it is observed.
    """
    if not x.size:
        return x, seen  # an empty tensor has no range
    axes = how.axes_of(x.shape)
    # A tensor of one number may be one example of a ``vmap``: the kernel would take the mean of
    # all examples, which does not hold them (see `_of_examples`).
    fused = fused_op() if quantize and x.size > 1 and how.is_fused(axes, x.dtype) else None
    if fused is not None:
        out, _, seen = fused(
            x,
            terms,
            row,
            seen,
            bits=qn.get_qtype(how.qtype).bits,
            symmetric=how.symmetric,
            batch_axes=len(axes),
            decay=how.decay,
            observe=observe,
            join=joined,
        )
        return out, seen
    # For XLA on CPU, whose compile time is a few milliseconds for each kernel, however small. Else
    # it computes what made the tensor again for each of the minimum, the maximum, the rounded
    # values and the mask of the gradient.
    x = lax.optimization_barrier(x)
    if how.fixed is not None:
        bounds = jnp.array(how.fixed, jnp.float32)
        return (_rounded(x, bounds, _grid(bounds, how), how) if quantize else x), seen
    own = _bounds(lax.stop_gradient(x), how, axes)
    terms, seen = lax.stop_gradient((terms, seen))
    terms = _row(terms, row)
    before = None if seen is None else _row(seen, row)
    if observe:
        assert seen is not None
        used = own
        if joined and before is not None:
            used = jnp.stack([lax.min(before[0], own[0]), lax.max(before[1], own[1])])
        place = row, np.int32(0)
        seen = lax.dynamic_update_slice(
            seen, used.reshape(1, 2), place, allow_negative_indices=False
        )
    else:
        # Where nothing was ever seen, as in the branch of a cond that was not taken, the tensor's
        # own range.
        used = jnp.where(terms[4] == 0, own, jnp.float32(jnp.nan))
        used = used if before is None else jnp.where(lax.is_finite(before), before, used)
    if quantize:
        x = _rounded(x, *lax.optimization_barrier(_on_average(terms, used, how)), how)
    return x, seen


def _row(table: jax.Array, row: jax.Array | int) -> jax.Array:
    return lax.dynamic_index_in_dim(table, row, 0, False, allow_negative_indices=False)


def _on_average(terms: jax.Array, bounds: jax.Array, how: How) -> tuple[jax.Array, jax.Array]:
    """Return the average bounds with those of a tensor, float32[2], and their grid.

    Args:
        terms: of the statistics: see ``terms_of``.
        bounds: of the tensor, float32[2]; left out where they are not finite.
        how: how it is quantized.
    """
    sums, weight, sums_before, weight_before = (terms[i] for i in range(4))
    add = np.float32(1.0 if how.decay is None else 1.0 - how.decay)
    wanted = lax.is_finite(bounds)
    total = lax.select(wanted, sums + (bounds if how.decay is None else add * bounds), sums_before)
    # A division last, which XLA does not compute again for each operation that reads it.
    average = total / lax.select(wanted, weight, weight_before)
    return average, _grid(lax.optimization_barrier(average), how)


def _grid(bounds: jax.Array, how: How) -> jax.Array:
    """Return what rounding to a range reads, float32[4].

    The scale, its reciprocal, and the least and the greatest number of steps from 0.
    """
    kind = qn.get_qtype(how.qtype)
    lower = None if how.symmetric else bounds[0]
    scale, point, _ = qn.scale_of(qn.Calibration(lower, bounds[1]), kind)
    ends = (-kind.qmax, kind.qmax) if point is None else kind.asymmetric
    assert ends is not None
    steps = [np.float32(end) if point is None else end - point.astype(jnp.float32) for end in ends]
    return jnp.stack([scale, 1 / scale, *steps])


@functools.partial(jax.custom_jvp, nondiff_argnums=(3,))
def _rounded(x: jax.Array, bounds: jax.Array, grid: jax.Array, how: How) -> jax.Array:
    """``qn.dequantize(qn.quantize_with(x, ...))`` without the integers between; NaN stays NaN."""
    scale, reciprocal, least, most = (lax.reshape(grid[i : i + 1], ()) for i in range(4))
    steps = lax.round(x.astype(jnp.float32) * reciprocal, lax.RoundingMethod.TO_NEAREST_EVEN)
    return (lax.clamp(least, steps, most) * scale).astype(x.dtype)


@_rounded.defjvp
def _rounded_jvp(how: How, primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    (x, bounds, grid), tangent = primals, tangents[0]
    lower, upper = (lax.reshape(bounds[i : i + 1], ()).astype(x.dtype) for i in range(2))
    inside = lax.eq(lax.clamp(lower, x, upper), x)
    return _rounded(x, bounds, grid, how), lax.select(inside, tangent, lax.full_like(tangent, 0))
