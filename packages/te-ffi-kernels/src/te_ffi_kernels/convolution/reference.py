"""Convolutions with packed weights, in plain JAX."""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ..packed_weights.config import clamped
from ..packed_weights.reference import quantize_rows
from ..packed_weights.weight import PackedWeight
from .config import Form

_EXACT = 2**24
"""All integers up to this are float32 numbers."""
_MOST_PARTS = 16


def convolve(form: Form, x: jax.Array, buffer: jax.Array, *operands: jax.Array) -> jax.Array:
    """Convolve images; see ``te_ffi_kernels.conv_w8a8`` and ``conv_w8a16``."""
    given, added = form.parted((buffer, *operands))
    weight = PackedWeight.of(given[0], form.n, form.layout)
    if not form.quantizes:
        kernel, of_columns = form.kernel(weight)
        wide = x.astype(jnp.float32), kernel.astype(jnp.float32)
        y = form.run(*wide, precision=lax.Precision.HIGHEST) * _of_channels(of_columns, x.ndim)
        return finish(form, y.astype(form.dtype), given, added)
    scale = given[1] if form.has_scale else None
    rows = x.reshape(x.shape[0], math.prod(x.shape[1:]))
    if x.dtype == jnp.int8:
        scales = quantize_rows(jnp.zeros((x.shape[0], 0)), scale)[1]
    else:
        rows, scales = quantize_rows(rows, scale)
    kernel, of_columns = form.kernel(weight)
    sums = _sums(form, rows.reshape(x.shape), kernel)
    # In this order, each product rounded, as a kernel has to.
    scales = scales.reshape(-1, *(1 for _ in x.shape[1:]))
    y = (sums * scales) * _of_channels(of_columns, sums.ndim)
    return finish(form, y.astype(form.dtype), given, added)


def _sums(form: Form, x: jax.Array, kernel: jax.Array) -> jax.Array:
    """Return exact sums of products of int8, in float32.

    XLA on CPU takes a hundred times as long for integers, so sums are taken in float32 where that
    holds them, of all input channels or of some of them after the others.
    """
    step = _EXACT // (128 * 128 * math.prod(form.window))
    channels = kernel.shape[-2]
    if step < channels and (form.groups > 1 or step * _MOST_PARTS < channels):
        wide = x.astype(jnp.int32), kernel.astype(jnp.int32)
        return form.run(*wide, preferred_element_type=jnp.int32).astype(jnp.float32)

    def part(x: jax.Array, kernel: jax.Array) -> jax.Array:
        floats = x.astype(jnp.float32), kernel.astype(jnp.float32)
        return form.run(*floats, precision=lax.Precision.HIGHEST)

    if step >= channels:
        return part(x, kernel)
    # All parts are exact, and so is their sum in int32, which is rounded once.
    parts = (
        part(x[..., i : i + step], kernel[..., i : i + step, :]).astype(jnp.int32)
        for i in range(0, channels, step)
    )
    return sum(parts, jnp.int32(0)).astype(jnp.float32)


def finish(
    form: Form, y: jax.Array, given: Sequence[jax.Array], added: Sequence[jax.Array]
) -> jax.Array:
    """Return a product with what is added to it, clamped, and as int8 if that is wanted.

    ``given`` and ``added`` are operands, as ``Form.parted`` returns them.
    """
    for array in added:
        y = y + (_of_channels(array, y.ndim) if array.ndim == 1 else array)
    y = clamped(y, form.clamp)
    if not form.to_int8:
        return y
    # XLA may keep more bits of a sum than its dtype has, where nothing stores it.
    kept = jnp.finfo(form.dtype)
    return quantize_rows(lax.reduce_precision(y, kept.nexp, kept.nmant), given[-1])[0]


def _of_channels(array: jax.Array, ndim: int) -> jax.Array:
    """Return numbers of output channels, for results with so many axes."""
    return jnp.expand_dims(array, range(ndim - 1))
