"""Phases: a transposed convolution as an ordinary one of the input as it is.

Between the places of the input of a transposed convolution lie zeros, and most of its products are
products of these. Results that are a step apart meet the same elements of the window, their phase:
so it is one ordinary convolution for each phase, with a part of the window, whose results
interleave (Dumoulin and Visin 2016, arXiv:1603.07285, section 4; Shi et al. 2016,
arXiv:1609.07009). All phases have the same input, so a kernel computes them at once, as further
output channels.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Phases:
    """How the window of a transposed convolution is packed: with columns for each of its phases.

    Along an axis, phase ``a`` of ``counts`` has the elements ``a``, ``a + counts``, ... of the
    window. The shorter ones are filled up with zeros, whose products with a NaN or an infinity in
    float activations are NaN. Hashable.

    Attributes:
        counts: for each axis of the window, its phases that have elements.
        groups: of output channels. Within a group, columns are in the order [*counts, channels].
    """

    counts: tuple[int, ...]
    groups: int

    def rows(self, k_sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of a phase's window and input channels, for those of the weight."""
        *window, channels = k_sizes
        pairs = zip(window, self.counts, strict=True)
        return (*(-(-size // count) for size, count in pairs), channels)

    def matrix(self, k_sizes: Sequence[int], n: int) -> tuple[int, int]:
        """Return the rows and columns that are packed, for the sizes of a weight."""
        return math.prod(self.rows(k_sizes)), n * math.prod(self.counts)

    def split(self, values: jax.Array, k_sizes: Sequence[int]) -> jax.Array:
        """Return quantized values [*lead, k, n] of the window as those that are packed."""
        *lead, _, n = values.shape
        *window, channels = k_sizes
        parts = self.rows(k_sizes)[:-1]
        first = len(lead)
        values = values.reshape(*lead, *window, channels, self.groups, -1)
        # Element `part * count + phase` of an axis becomes [part, phase].
        config = [(0, 0, 0)] * values.ndim
        for axis, (size, padded) in enumerate(zip(window, self._filled(parts), strict=True)):
            config[first + axis] = 0, padded - size, 0
        values = lax.pad(values, jnp.zeros((), values.dtype), config)
        pairs = zip(parts, self.counts, strict=True)
        values = values.reshape(
            *lead, *itertools.chain(*pairs), channels, self.groups, n // self.groups
        )
        values = values.transpose(self._packed_order(first))
        return values.reshape(*lead, *self.matrix(k_sizes, n))

    def joined(self, values: jax.Array, k_sizes: Sequence[int]) -> jax.Array:
        """Return quantized values [*lead, k, n] of the window, for those that are packed."""
        *lead, _, columns = values.shape
        *window, channels = k_sizes
        first, parts = len(lead), self.rows(k_sizes)
        n = columns // math.prod(self.counts)
        values = values.reshape(*lead, *parts, self.groups, *self.counts, n // self.groups)
        order = self._packed_order(first)
        values = values.transpose([order.index(axis) for axis in range(values.ndim)])
        values = values.reshape(*lead, *self._filled(parts[:-1]), channels, n)
        values = lax.slice(values, [0] * values.ndim, (*lead, *window, channels, n))
        return values.reshape(*lead, -1, n)

    def _filled(self, parts: Sequence[int]) -> list[int]:
        """Return the sizes of the window with all phases as long, for those of a phase's window."""
        return [part * count for part, count in zip(parts, self.counts, strict=True)]

    def _packed_order(self, first: int) -> list[int]:
        """Return the order of the axes of what is packed, in [*lead, (part, phase)s, c, g, n]."""
        axes = len(self.counts)
        parts = [first + 2 * axis for axis in range(axes)]
        phases = [part + 1 for part in parts]
        channels = first + 2 * axes
        return [*range(first), *parts, channels, channels + 1, *phases, channels + 2]

    def columns(self, of_channels: jax.Array) -> jax.Array:
        """Return numbers [..., n] of output channels as those of the columns that are packed."""
        *lead, n = of_channels.shape
        split = of_channels.reshape(*lead, self.groups, 1, n // self.groups)
        shape = *lead, self.groups, math.prod(self.counts), n // self.groups
        return jnp.broadcast_to(split, shape).reshape(*lead, -1)

    def channels(self, of_columns: jax.Array) -> jax.Array:
        """Return numbers [..., n] of output channels, for those of ``columns``."""
        *lead, columns = of_columns.shape
        phases = math.prod(self.counts)
        split = of_columns.reshape(*lead, self.groups, phases, columns // phases // self.groups)
        return split[..., 0, :].reshape(*lead, -1)


class Axis(NamedTuple):
    """What a transposed convolution is along one axis.

    Attributes:
        padding: of the convolution of all phases.
        dilation: of a phase's elements.
        out: places of the result.
        count: of each phase, results that interleave.
        places: for each place of ``step`` adjacent results, the phase, and the first of its results
            that is one; None for a place whose phase has no elements.
    """

    padding: tuple[int, int]
    dilation: int
    out: int
    count: int
    places: tuple[tuple[int, int] | None, ...]

    @property
    def is_whole(self) -> bool:
        """Return whether places have all results of the phases, in their order or turned around."""
        order = [(phase, 0) for phase in range(len(self.places))]
        return self.places in (tuple(order), tuple(order[::-1]))


def axis_of(
    size: int, window: int, step: int, dilation: int, padding: tuple[int, int], count: int
) -> Axis:
    """Return what a transposed convolution is along one axis.

    Args:
        size: of the input.
        window: its elements.
        step: from place to place of the input, in results.
        dilation: from element to element of the window, in results.
        padding: results before and after the first and last place.
        count: phases that have elements, ``phases_of``.
    """
    low, high = padding
    reach = (window - 1) * dilation + 1
    out = max(0, (0 if size == 0 else (size - 1) * step + 1) + low + high - reach + 1)
    # Result r takes element e of the window from place (r - low + e * dilation) / step of the
    # input, if that is a whole number: with the elements of a phase, for every `step`-th result.
    # Result `step * q + place` reads the input at `q + begin`, and every `apart` after it.
    places = [(low - phase * dilation) % step for phase in range(count)]
    begins = [
        (place + phase * dilation - low) // step for phase, place in enumerate(places)
    ]  # exact
    first = min(begins)
    apart = dilation // math.gcd(step, dilation)
    each = -(-out // step)
    # All phases are summed from the least of their begins on: some sums of the others are unused.
    sums = each + max(begins) - first
    reach = (-(-window // count) - 1) * apart + 1
    padded = -first, sums - 1 + reach - size + first
    found: list[tuple[int, int] | None] = [None] * step
    for phase, (place, begin) in enumerate(zip(places, begins, strict=True)):
        found[place] = phase, begin - first
    return Axis(padded, apart, out, each, tuple(found))


def phases_of(window: int, step: int, dilation: int) -> int:
    """Return how many phases have elements along one axis; see ``axis_of``."""
    return min(window, step // math.gcd(step, dilation))


def interleaved(
    sums: jax.Array, phases: Phases, axes: Sequence[Axis], empty: jax.Array | None
) -> jax.Array:
    """Return results [images, *sizes, n] of all phases of a convolution.

    Args:
        sums: [images, *sizes, columns] of the convolution of all phases.
        phases: how columns are phases.
        axes: one for each axis of sizes.
        empty: [n], the results of phases without elements; None if all have some.
    """
    images, columns = sums.shape[0], sums.shape[-1]
    n = columns // math.prod(phases.counts)
    split = sums.reshape(*sums.shape[:-1], phases.groups, *phases.counts, n // phases.groups)
    counts = [axis.count for axis in axes]
    steps = [len(axis.places) for axis in axes]
    rank = len(axes)
    if all(axis.is_whole for axis in axes):
        # One pass over the results: XLA takes twice as long to cut phases out and join them.
        turned = [2 + rank + i for i, axis in enumerate(axes) if axis.places[0] != (0, 0)]
        split = lax.rev(split, turned)
        places = range(2 + rank, 2 + 2 * rank)
        pairs = itertools.chain(*((1 + i, place) for i, place in enumerate(places)))
        split = split.transpose([0, *pairs, 1 + rank, 2 + 2 * rank])
        return _of_sizes(split, axes, n)
    found = []
    for places in itertools.product(*(axis.places for axis in axes)):
        known = [place for place in places if place is not None]
        if len(known) < len(places):
            assert empty is not None
            found.append(jnp.broadcast_to(empty, (images, *counts, n)))
            continue
        start = [0, *(begin for _, begin in known), 0, *(phase for phase, _ in known), 0]
        ends = [begin + count for (_, begin), count in zip(known, counts, strict=True)]
        limit = [images, *ends, phases.groups, *(phase + 1 for phase, _ in known), split.shape[-1]]
        found.append(lax.slice(split, start, limit).reshape(images, *counts, n))
    # [images, *counts, places, n]: places are next to the results that they interleave with.
    whole = jnp.stack(found, axis=rank + 1).reshape(images, *counts, *steps, n)
    order = [0, *itertools.chain(*((1 + i, 1 + rank + i) for i in range(rank))), 1 + 2 * rank]
    return _of_sizes(whole.transpose(order), axes, n)


def _of_sizes(split: jax.Array, axes: Sequence[Axis], n: int) -> jax.Array:
    """Return [images, *sizes, n] of [images, (count, place)s, ...], without what is beyond."""
    images = split.shape[0]
    whole = split.reshape(images, *(axis.count * len(axis.places) for axis in axes), n)
    return lax.slice(whole, [0] * whole.ndim, (images, *(axis.out for axis in axes), n))
