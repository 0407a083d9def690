"""The ranges that one call of a program has seen."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core import get_opaque_trace_state

from .statistics import QuantStats


class Seen:
    """The bounds that a call has seen: a table of a row for each site, or for each of its steps.

    A site in the trace that the call began in passes the table on to the next one, as an ordinary
    value. In a reference it would take three equations to read and to write it, and JAX goes
    through each equation of a program that it differentiates.

    The body of a loop, of a branch or of ``jax.checkpoint`` is another trace. Its values stay in
    it, so that sites there have a reference. A row is written in one of both places, or its bounds
    are joined: what both hold is the union of their bounds.

    Args:
        stats: the statistics that the ranges are for.
        count: how many rows they have.
    """

    def __init__(self, stats: QuantStats, count: int):
        nothing = np.tile(np.array([np.inf, -np.inf], np.float32), (count, 1))
        self._table: Any = nothing
        self._began_in = get_opaque_trace_state()
        self._in_bodies = stats.box.beside(nothing)
        # A compiled program has the same Box each time.
        self._in_bodies.set(nothing)
        self._is_behind = False  # bodies have written since the table was joined with theirs

    def get(self, wanted: bool = True) -> jax.Array:
        """Return the table, float32[rows, 2]; not finite at sites that have seen nothing.

        Args:
            wanted: whether rows are read. Else it is only to be written to, and need not have
                what was seen elsewhere.
        """
        if get_opaque_trace_state() != self._began_in:
            inside = self._in_bodies.get()
            return _union(inside, self._table) if wanted else inside
        if self._is_behind and wanted:
            self._table = _union(self._table, self._in_bodies.get())
            self._is_behind = False
        return self._table

    def set(self, table: jax.Array) -> None:
        """Replace the table that ``get`` returned, where it was called."""
        if get_opaque_trace_state() == self._began_in:
            self._table = table
        else:
            self._in_bodies.set(table)
            self._is_behind = True


def _union(one: jax.Array, other: jax.Array) -> jax.Array:
    """Return bounds that hold those of both tables."""
    lower = lax.min(one[:, :1], other[:, :1])
    return lax.concatenate([lower, lax.max(one[:, 1:], other[:, 1:])], 1)
