"""Convolutions with packed weights, in plain JAX."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from ..packed_weights.config import clamped
from ..packed_weights.reference import quantize_rows
from ..packed_weights.weight import PackedWeight
from .config import Form


def convolve(form: Form, x: jax.Array, buffer: jax.Array, *operands: jax.Array) -> jax.Array:
    """Convolve int8 values; see ``te_ffi_kernels.conv_w8a8``."""
    given, added = form.parted((buffer, *operands))
    weight = PackedWeight.of(given[0], form.n, form.layout)
    scale = given[1] if form.has_scale else None
    rows, scales = quantize_rows(x.reshape(x.shape[0], math.prod(x.shape[1:])), scale)
    kernel, of_columns = form.kernel(weight)
    # XLA sums int8 in int32 of its own accord only where it has a kernel for that.
    sums = form.run(
        rows.reshape(x.shape).astype(jnp.int32),
        kernel.astype(jnp.int32),
        preferred_element_type=jnp.int32,
    )
    # In this order, each product rounded, as a kernel has to.
    scales = scales.reshape(-1, *(1 for _ in x.shape[1:]))
    y = (sums.astype(jnp.float32) * scales) * _of_channels(of_columns, sums.ndim)
    return finish(form, y.astype(form.dtype), added)


def finish(form: Form, y: jax.Array, added: tuple[jax.Array, ...]) -> jax.Array:
    """Return a product with what is added to it, clamped."""
    for array in added:
        y = y + (_of_channels(array, y.ndim) if array.ndim == 1 else array)
    return clamped(y, form.clamp)


def _of_channels(array: jax.Array, ndim: int) -> jax.Array:
    """Return numbers of output channels, for results with so many axes."""
    return jnp.expand_dims(array, range(ndim - 1))
