"""N:M sparsity: n of each m consecutive elements stay, others are zero."""

from __future__ import annotations

import re
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Pattern(NamedTuple):
    """N:M, as ``"2:4"``: at most ``n`` of ``m`` consecutive elements are nonzero."""

    n: int
    m: int

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


class Sparsity(NamedTuple):
    """Which elements of a parameter are zeros: a pattern along one axis."""

    pattern: Pattern
    axis: int


def parse_sparsity(text: str) -> Pattern:
    """Read a pattern such as ``"2:4"``.

    Raises:
        ValueError: ``text`` is not N:M with 0 < N < M.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text, re.ASCII) if isinstance(text, str) else None
    if found is None or not 0 < int(found[1]) < int(found[2]):
        raise ValueError("'N:M' with 0 < N < M, such as '2:4'")
    return Pattern(int(found[1]), int(found[2]))


def kept(score: jax.Array, pattern: Pattern, axis: int) -> jax.Array:
    """Return which elements stay: the n largest scores of each m.

    Of equal scores the first one stays (arXiv:2104.08378, section 3.1, where scores are
    magnitudes).

    Args:
        score: float; m divides the axis.
        pattern: N:M.
        axis: of ``score``.

    Returns:
        bool, of the shape of ``score``.
    """
    moved = jnp.moveaxis(score, axis, -1)
    groups = moved.reshape(*moved.shape[:-1], -1, pattern.m)
    # The rank of each in its group, from the largest.
    ranks = jnp.argsort(jnp.argsort(-groups, axis=-1, stable=True), axis=-1, stable=True)
    return jnp.moveaxis((ranks < pattern.n).reshape(moved.shape), -1, axis)


def sparsified(w: jax.Array, sparsity: Sparsity) -> jax.Array:
    """Return an array with zeros instead of its smaller magnitudes."""
    keep = kept(jnp.abs(w), sparsity.pattern, sparsity.axis)
    return jnp.where(keep, w, jnp.zeros((), w.dtype))
