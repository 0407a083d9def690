"""Compare the outputs of two programs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from provider_xla.features import is_array, of_arrays

from .errors_at import Sums, difference, error_of
from .results import OutputQuality

if TYPE_CHECKING:
    from provider_xla import Plan


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
