"""How attention is shared out: each device computes its batches and heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from .._rows import partition_rows
from .config import Config, Sizes

Names = list[list[str]]


def partitioned(
    config: Config,
    sizes: Sizes,
    given: Names,
    found: Names,
    sums: Sequence[int],
    results: Callable[..., Any],
    attributes: Callable[..., dict[str, Any]],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function of the operands partitionable by batches and heads, where these allow it.

    Args:
        config: of the call. Packed sequences and random numbers depend on the whole batch.
        sizes: of the call.
        given: names of the operands' axes.
        found: of the results' axes.
        sums: the results that are sums over batches or heads.
        results: of a device, a function of its operands.
        attributes: likewise.

    Returns:
        What makes a function of the operands of ``kernel(results, attributes, *operands)``.
    """

    def partition(kernel: Callable[..., Any]) -> Callable[..., Any]:
        if config.layout.is_thd() or config.dropout > 0:
            return lambda *operands: kernel(results(*operands), attributes(*operands), *operands)
        shared = {"b"} if sizes.heads != sizes.kv_heads else {"b", "h"}
        whole = {name for names in (*given, *found) for name in names} - shared
        return partition_rows(given, found, whole, results, attributes, sums)(kernel)

    return partition


def names_of(sizes: Sizes, qkv: Sequence[jax.Array]) -> Names:
    """Names of the axes of the three arrays; heads of keys are those of queries, or fewer."""
    found = []
    for i, array in enumerate(qkv):
        inner = ["three"] if array.ndim == 5 else []
        heads = "g" if i and sizes.heads != sizes.kv_heads else "h"
        found.append(["b", f"s{i}", *inner, heads, f"d{i}"])
    return found + [[f"none{i}"] for i in range(3 - len(qkv))]


def names_of_bias(sizes: Sizes, bias: jax.Array) -> list[str]:
    """Names of the axes of a bias, which has all batches and heads, or one."""
    if bias.ndim != 4:
        return [f"bias{i}" for i in range(bias.ndim)]
    return [
        "b" if bias.shape[0] == sizes.batch else "bias0",
        "h" if bias.shape[1] == sizes.heads else "bias1",
        "bias2",
        "bias3",
    ]


def names_of_offset(offset: jax.Array) -> list[str]:
    """Names of the axes of the softmax offset."""
    return ["offset0", "h", "offset2", "offset3"] if offset.ndim == 4 else ["offset0"]


def names_of_seed(name: str, seed: jax.Array) -> list[str]:
    """Names of the axes of a seed or a random state."""
    return [f"{name}{i}" for i in range(seed.ndim)]


SEQUENCES: Names = [["b"], ["b"], ["starts0"], ["starts1"]]
