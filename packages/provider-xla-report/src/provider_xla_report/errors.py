"""Errors of one operation, of the outputs, and of each parameter: quantized beside float."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from provider_xla import WeightPlan
from provider_xla.features import (
    Hows,
    Largest,
    Operands,
    Site,
    by_path,
    is_array,
    is_stored,
    of_arrays,
    own_form,
    quantized_contraction,
    whole_results,
)
from quant_numerics import Contraction, Convolution, Matmul, RaggedMatmul

from .results import Error, OutputQuality, ParameterQuality

if TYPE_CHECKING:
    from provider_xla import Plan


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


def compare_outputs(
    plan: Plan,
    quantized: Callable[..., Any],
    params: Any,
    packed: Any,
    batches: Sequence[tuple],
) -> tuple[OutputQuality, ...]:
    """Compare each array of the results of the plan's function in float and quantized."""
    totals: dict[str, Any] = {}
    types: dict[str, Any] = {}
    for batch in batches:
        expected, names = called(plan.fn, plan, params, batch)()
        found, _ = called(quantized, plan, packed, batch)()
        for name, x, y in zip(names, expected, found, strict=True):
            one = jax.device_get(_compared(x, y))
            one = jax.tree.map(np.float64, one)
            total = totals.setdefault(name, [])
            total.append((one, max(x.size, 1)))
            types[name] = x
    return tuple(_output(name, types[name], totals[name]) for name in totals)


@jax.jit
def _compared(x: jax.Array, y: jax.Array) -> Any:
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x, y = (jnp.stack([z.real, z.imag]) for z in (x, y))
    if jnp.issubdtype(x.dtype, jnp.floating):
        return difference(x, y)
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x, y = jax.random.key_data(x), jax.random.key_data(y)
    return jnp.mean((x == y).astype(jnp.float32))


def _output(name: str, x: Any, parts: Sequence[tuple[Any, int]]) -> OutputQuality:
    about = name, tuple(x.shape), x.dtype.name
    if not isinstance(parts[0][0], Sums):
        size = sum(count for _, count in parts)
        return OutputQuality(*about, None, None, float(sum(e * n for e, n in parts) / size))
    sums = [one for one, _ in parts]
    total = jax.tree.map(lambda *xs: np.stack(xs), *sums)
    dot, signal, quantized = (np.sum(x) for x in (total.dot, total.signal, total.quantized))
    scale = math.sqrt(signal * quantized) if signal >= 0 and quantized >= 0 else math.nan
    cosine = float(dot / scale) if math.isfinite(scale) and scale else None
    return OutputQuality(*about, error_of(total), cosine, None)


def called(fn: Callable[..., Any], plan: Plan, params: Any, batch: tuple) -> Callable[[], Any]:
    """Return a jitted call that returns the result's arrays and structure."""
    names: list[str] = []

    def named(*args: Any) -> list[Any]:
        found, _ = jax.tree_util.tree_flatten_with_path(fn(*args))
        arrays = [(jax.tree_util.keystr(path), leaf) for path, leaf in found if is_array(leaf)]
        names[:] = [name for name, _ in arrays]
        return [leaf for _, leaf in arrays]

    call, arrays = of_arrays(named, plan.arguments(params, batch), {})
    jitted = jax.jit(call)
    return lambda: (jax.block_until_ready(jitted(arrays)), names)


def measure_parameters(
    plan: Plan, params: Any, stored: Any, packed: Any
) -> tuple[ParameterQuality, ...]:
    """Measure the error of what is stored, and the size of it packed for kernels."""
    given, _ = by_path(params, plan.prefix)
    trees = (jax.tree.leaves(tree, is_leaf=is_stored) for tree in (stored, packed))
    held = dict(zip(given, zip(*trees, strict=True), strict=True))
    # Derived weights have separate rows, so they do not count with their parameter.
    values = {path: leaf for path, leaf in given.items() if is_array(leaf)}
    parts = {path: tuple(map(own_form, pair)) for path, pair in held.items()}
    for path, weight in plan.weights.items():
        if weight.derived is not None:
            key = weight.derived.expression.key
            parts[path] = tuple(one.derived[key] for one in held[weight.derived.carrier])
            values[path] = weight.derived.expression.evaluate(given)
    parameters = []
    for path, leaf in values.items():
        (qvalue, run), weight = parts[path], plan.weights.get(path)
        sums = jax.device_get(_stored_error(leaf, qvalue)) if is_stored(qvalue) else None
        parameters.append(
            ParameterQuality(
                path,
                tuple(leaf.shape),
                leaf.dtype.name,
                None if weight is None else weight.qtype,
                None if weight is None else weight.rule,
                leaf.size * leaf.dtype.itemsize if weight is None or not weight.derived else 0,
                _bytes_run(run, leaf, weight),
                None if sums is None else error_of(sums),
            )
        )
    return tuple(parameters)


def _bytes_run(run: Any, leaf: Any, weight: WeightPlan | None) -> int:
    """Return the bytes that the quantized program has for a parameter."""
    if is_stored(run):
        return run.nbytes
    if run is None:
        return 0
    return leaf.size * leaf.dtype.itemsize if weight is None else weight.bytes_after


@jax.jit
def _stored_error(leaf: jax.Array, held: Any) -> Sums:
    return difference(leaf, held.restore().astype(leaf.dtype))
