"""One operation's error: quantized beside float results, as sums."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from provider_xla.features import (
    Hows,
    Largest,
    Operands,
    Site,
    quantized_contraction,
    whole_results,
)
from quant_numerics import Contraction, Convolution, Matmul, RaggedMatmul

from .results import Error

Ranges = tuple[qn.Calibration | None, qn.Calibration | None]


class Sums(NamedTuple):
    """Sums that compare two results; a pytree for ``probe``.

    All are scalars, float32 (float64 for float64 results).

    Attributes:
        signal: sum of the squares of the float result.
        noise: sum of the squares of the difference.
        dot: sum of the products of both results.
        quantized: sum of the squares of the quantized result.
        largest: the largest magnitude of the difference.
        visits: how many results, counting each example that the program maps over.
    """

    signal: Any
    noise: Any
    dot: Any
    quantized: Any
    largest: Largest
    visits: Any


def site_error(
    site: Site,
    hows: Hows | None = None,
    ranges: Ranges = (None, None),
    operands: Operands | None = None,
) -> Sums:
    """Return the error that quantizing one operation makes, on its float operands.

    ``hows`` are the rule's by default, a range that is None is measured, and ``operands`` replace
    those of the quantized run, such as by a stored parameter.
    """
    expected = site.contraction.run(*site.operands, *site.extras)
    hows = site.hows if hows is None else hows
    given = site.operands if operands is None else operands
    found = quantized_contraction(site.contraction, hows, *given, site.extras, ranges)
    return difference(expected, found)


def difference(expected: jax.Array, found: jax.Array) -> Sums:
    """Return how far ``found`` is from ``expected``, floats of one shape."""
    return whole_results(_difference, expected, found)


def _difference(expected: jax.Array, found: jax.Array) -> Sums:
    dtype = jnp.promote_types(expected.dtype, jnp.float32)
    x, y = expected.astype(dtype), found.astype(dtype)
    apart = y - x
    return Sums(
        jnp.sum(x * x),
        jnp.sum(apart * apart),
        jnp.sum(x * y),
        jnp.sum(y * y),
        Largest(jnp.max(jnp.abs(apart), initial=0)),
        _visits(expected),
    )


def visits(*values: jax.Array) -> jax.Array:
    """Return 1.0, mapped like the values, so that ``probe`` counts it."""
    return whole_results(_visits, *values)


def _visits(*values: jax.Array) -> jax.Array:
    # Depend on each value without using it, so that vmap maps the result over the examples.
    one = jnp.ones(1, bool)
    for x in values:
        first = jnp.ravel(x)[:1]
        one = one & ((first == first) | True)
    return jnp.sum(one.astype(jnp.float32))


def decibels(signal: Any, noise: Any) -> float | None:
    """Return ``10 log10(signal / noise)``.

    Infinity where there is no noise; None where either is not finite or there is noise alone.
    """
    signal, noise = float(signal), float(noise)
    if not math.isfinite(signal) or not math.isfinite(noise):
        return None
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else None


def flops(contraction: Contraction, lhs: Any, rhs: Any, extras: tuple[Any, ...]) -> int:
    """Return the floating-point operations of a contraction: two per multiplication.

    What a convolution multiplies with padding counts too.
    """
    out = jax.eval_shape(contraction.run, lhs, rhs, *extras)
    size = int(np.prod(out.shape, dtype=np.int64))
    if isinstance(contraction, Convolution):
        return 2 * size * (int(np.prod(rhs.shape)) // rhs.shape[contraction.numbers.rhs_spec[0]])
    assert isinstance(contraction, Matmul | RaggedMatmul)
    left, right = contraction.dims[0]
    contracted = math.prod(
        max(lhs.shape[a], rhs.shape[b]) for a, b in zip(left, right, strict=True)
    )
    if isinstance(contraction, RaggedMatmul):
        (ragged,) = contraction.numbers.lhs_ragged_dimensions
        if ragged in left:
            # Groups cut the contracted axis, and each result sums over one of them.
            size //= extras[0].shape[-1]
    return 2 * size * contracted


def error_of(sums: Sums | None) -> Error:
    """Return the error that sums of a measurement say."""
    if sums is None or not np.sum(sums.visits):
        return Error(None, None)
    signal, noise = (np.sum(x, dtype=np.float64) for x in (sums.signal, sums.noise))
    largest = float(np.max(sums.largest.value))
    return Error(decibels(signal, noise), largest if math.isfinite(largest) else None)
