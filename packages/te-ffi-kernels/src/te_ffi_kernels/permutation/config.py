"""Checks of the arguments of token_dispatch and token_combine."""

from __future__ import annotations

import math
import operator
from typing import Any

import jax
import jax.numpy as jnp

from .. import checks

MOST_ROWS = 2**31 - 1
"""Rows are counted in int32, as Transformer Engine's row_id_map has them."""


def countable(op: str, name: str, rows: int, what: str) -> None:
    """Raise where there may be more rows than int32 counts.

    Args:
        op: the op that was called.
        name: of the argument that says how many rows there may be.
        rows: the most that there can be.
        what: what that number is.
    """
    if rows > MOST_ROWS:
        raise ValueError(
            f"{op}: {name} must be for at most {MOST_ROWS} rows, which int32 counts, got {rows} "
            f"({what}). Dispatch the tokens in parts."
        )


def count(op: str, name: str, given: Any) -> int:
    """Return a positive integer."""
    try:
        found = operator.index(given)
    except TypeError:
        raise TypeError(
            f"{op}: {name} must be an integer of Python, got {type(given).__name__}. It "
            "is part of the compiled program"
        ) from None
    if found < 1:
        raise ValueError(f"{op}: {name} must be positive, got {found}")
    return found


def flat(op: str, name: str, x: jax.Array, last: str) -> jax.Array:
    """Return an array as a matrix whose rows are tokens."""
    if x.ndim < 2:
        raise ValueError(f"{op}: {name} must have shape [tokens, {last}], got {x.shape}")
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def tokens(op: str, name: str, x: jax.Array, wanted: int, of: str) -> None:
    """Raise where a matrix has another number of tokens."""
    if x.shape[0] != wanted:
        raise ValueError(f"{op}: {name} must have {wanted} tokens, as {of}, got {x.shape[0]}")


def row_map(op: str, row_id_map: jax.Array, pad_offsets: jax.Array) -> int:
    """Check a map of rows, and return its number of experts."""
    checks.dtype(op, "row_id_map", row_id_map.dtype, (jnp.int32,))
    checks.dtype(op, "pad_offsets", pad_offsets.dtype, (jnp.int32,))
    if row_id_map.ndim != 2 or row_id_map.shape[1] % 2 == 0:
        raise ValueError(
            f"{op}: row_id_map must have shape [tokens, 2 * experts + 1], as "
            f"token_dispatch gives it, got {row_id_map.shape}"
        )
    experts = row_id_map.shape[1] // 2
    if pad_offsets.shape != (0,):
        checks.shape(op, "pad_offsets", pad_offsets, (experts,), "as token_dispatch gives it")
    return experts


def probs(op: str, name: str, given: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Return probabilities as [tokens, experts]."""
    checks.dtype(op, name, given.dtype, checks.FLOATS)
    found = flat(op, name, given, "experts")
    checks.shape(op, name, found, shape, "one for each token and expert")
    return found
