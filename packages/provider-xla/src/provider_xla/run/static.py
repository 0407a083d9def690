"""Static ranges: statistics of activations, by site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

import quant_numerics as qn
from hijax_trace import Box
from interception_core import JaxtapError

from ..program.sites import SIDES, Site
from .transformed import beside

Statistics = Mapping[str, Any]
"""By site and side (``"mlp/dot:0#lhs"``): ``quant_numerics.Statistics``, or a Calibration."""


class StaticRange(NamedTuple):
    """An activation with a static range: its number of axes, and whether that is symmetric."""

    ndim: int
    symmetric: bool


def is_static(site: Site, side: int) -> bool:
    """Returns whether an operand has a static range."""
    activation = site.weights[side] is None and site.hows[side] is not None
    return activation and bool(site.rule.act_static_scale)


def measure(site: Site, side: int) -> qn.Calibration:
    """Returns the range of an activation: one for all of it, as float32 of shape (1, ..., 1).

    The mean over the batch axes of the rule of the largest over the others. Where the program
    maps over examples, by ``vmap``, the mean over these.
    """
    how, x = site.hows[side], jax.lax.stop_gradient(site.operands[side])
    assert how is not None
    held = beside(site, side)
    x = x if held is None else held.activation(site.product, 1 - side, x)
    batch = {a % x.ndim for a in site.rule.act_batch_axes if -x.ndim <= a < x.ndim}
    shared = site.product.shared(side, x.ndim)
    axes = tuple(sorted(batch - set(shared)))
    found = qn.calibrate(x, how.qtype, channel_axes=axes, method=how.method)
    return jax.tree.map(lambda bound: _mean(jnp.mean(bound, axis=axes, keepdims=True)), found)


@custom_vmap
def _mean(x: jax.Array) -> jax.Array:
    """Returns ``x``; where the program maps over it, the mean of what is mapped."""
    return x


@_mean.def_vmap
def _mean_rule(size: int, is_batched: Sequence[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return _mean(x.mean(0) if is_batched[0] else x), False


class Observation:
    """The static ranges of one call of a program.

    Steps of loops, and layers that share a module path, are joined by their extremes: a mean
    over steps would clip the steps with the largest values. Calls are averaged.

    Args:
        statistics: ``quant_numerics.Statistics`` by site and side, to which the call is added.
    """

    def __init__(self, statistics: Statistics):
        self._statistics = statistics
        self._seen: dict[str, Box] = {}
        for key, one in statistics.items():
            total = one.state.total
            # Of what is never seen, a branch that is not taken, bounds are not finite.
            lower = None if total.lower is None else jnp.full_like(total.lower, jnp.inf)
            self._seen[key] = Box(qn.Calibration(lower, jnp.full_like(total.upper, -jnp.inf)))

    def observe(self, site: Site) -> None:
        """Take the ranges of the activations of a site that have a static one."""
        for side in (0, 1):
            if is_static(site, side):
                key = _key(self._statistics, site, side)
                found, seen = measure(site, side), self._seen[key].get()
                lower = None if found.lower is None else jnp.minimum(seen.lower, found.lower)
                self._seen[key].set(qn.Calibration(lower, jnp.maximum(seen.upper, found.upper)))

    def calibrations(self, site: Site) -> tuple[qn.Calibration | None, qn.Calibration | None]:
        """Return the ranges of both operands so far, this call included."""

        def one(side: int) -> qn.Calibration | None:
            if not is_static(site, side):
                return None
            key = _key(self._statistics, site, side)
            found = self._statistics[key]
            return found.average.get(found.average.update(found.state, self._seen[key].get()))

        return one(0), one(1)

    def finish(self) -> None:
        """Add the call to the statistics."""
        for key, one in self._statistics.items():
            one.observe(self._seen[key].get())


def calibrations(
    statistics: Statistics | None, site: Site
) -> tuple[qn.Calibration | None, qn.Calibration | None]:
    """Returns the static ranges of both operands, where they have one.

    Raises:
        JaxtapError: a range is needed and there is none.
    """

    def one(side: int) -> qn.Calibration | None:
        if not is_static(site, side):
            return None
        found = _of(statistics, site, side)
        return found if isinstance(found, qn.Calibration) else found.calibration()

    return one(0), one(1)


def key_of(key: str, transformed: bool) -> str:
    """Returns what the statistics of an operand are kept under: those of a transformed one apart,
    so that its range is never that of the activation as it was.
    """
    return f"{key} (transformed)" if transformed else key


def _of(statistics: Statistics | None, site: Site, side: int) -> Any:
    key = _key(statistics, site, side)
    assert statistics is not None
    return statistics[key]


def _key(statistics: Statistics | None, site: Site, side: int) -> str:
    """Return what the statistics of an operand are kept under. Raise if there are none."""
    key = key_of(site.key(side), beside(site, side) is not None)
    if statistics is None:
        raise JaxtapError(
            f"The rule of {site.call.op_id} has act_static_scale=True, and there are no "
            "statistics to take the range from. Measure them with plan.calibrate(fn, params, "
            "batches), and pass them as statistics=."
        )
    if key not in statistics:
        known = ", ".join(sorted(statistics)) or "none"
        raise JaxtapError(
            f"There are no statistics for {key} (the {SIDES[side]} of {site.call.op_id}), only "
            f"for: {known}. They were made for another program, for other rules, or for parameters "
            "that no pass, or another one, has transformed: measure with those that are run."
        )
    return key
