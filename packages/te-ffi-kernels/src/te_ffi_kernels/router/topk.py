"""The largest numbers of rows."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import checks
from ..batching import more_rows
from ..op import Op
from ..partition import partition_rows
from . import config


def topk(x: jax.Array, k_value: int) -> tuple[jax.Array, jax.Array]:
    """Return the largest numbers of each row, and where they are.

    As ``topk`` of Transformer Engine's JAX extension, whose results have no order; these have that
    of ``lax.top_k``: the largest first, and of equal numbers the lower index. NaN is beyond
    infinity.

    Args:
        x: float32, bfloat16 or float16 [..., numbers].
        k_value: how many, as part of the compiled program.

    Returns:
        [..., k_value] of x's dtype, and int32 indices of the same shape. The first is
        differentiable.

    Raises:
        TypeError, ValueError: an argument has another dtype, shape or value than above.
    """
    op = "topk"
    checks.dtype(op, "x", x.dtype, checks.FLOATS)
    k = config.whole(op, "k_value", k_value)
    if x.ndim < 1 or not 1 <= k <= x.shape[-1]:
        raise ValueError(
            f"{op}: k_value must be from 1 to the size of x's last axis, got {k} for shape "
            f"{x.shape}"
        )
    return _TOPK(k, x)


def _reference(k: int, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    values, indices = lax.top_k(x, k)
    return values, indices.astype(jnp.int32)


def _results(k: int, x: jax.Array) -> Any:
    shape = (*x.shape[:-1], k)
    return jax.ShapeDtypeStruct(shape, x.dtype), jax.ShapeDtypeStruct(shape, jnp.int32)


def _partition(k: int, block: Any, x: jax.Array) -> Any:
    """Share out rows."""
    rows = [f"r{i}" for i in range(x.ndim - 1)]
    found = [[*rows, "k"]] * 2
    return partition_rows(functools.partial(block, k), [[*rows, "n"]], found, {"n", "k"})


def _gradient(k: int, saved: Any, cts: Any) -> Any:
    x, indices = saved
    pull = jax.vjp(lambda x: jnp.take_along_axis(x, indices, -1), x)[1]
    return pull(cts[0])


_TOPK = Op(
    "topk",
    _reference,
    results=_results,
    attributes=lambda k, _: {"k_value": k},
    partition=_partition,
    batch=more_rows,
    save=lambda k, operands, found: (operands[0], found[1]),
    gradient=_gradient,
)
