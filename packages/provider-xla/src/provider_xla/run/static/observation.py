"""Observation: measures the static ranges of one call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import Box

from ...program.sites import Site
from .gradients import refused, watched
from .jax_errors import explained
from .place import Place, filled, scalar
from .ranges import GRADIENT, cut_off, has_range, is_in_loop, measure
from .statistics import Statistics, as_arguments, gradient_key_at, key_at


class Observation:
    """The static ranges of one call of a program.

    Each step of a loop of known length has its own range, if its rule has it so. Others are joined
    by their extremes: a mean over steps would clip the steps with the largest values. Calls are
    averaged, or remembered.

    The backward pass runs after the call has ended. So the histories of gradients get a place for
    this call as it begins, and what the backward pass records is for the next one.

    Args:
        statistics: ``quant_numerics.Statistics`` by site and side, to which the call is added.
        trains: as in ``has_range``.
        tells_cuts: whether ``cuts`` can be asked for.
    """

    def __init__(self, statistics: Statistics, *, trains: bool = True, tells_cuts: bool = False):
        self._statistics = statistics
        self._trains = trains
        self._cuts: dict[str, Box] | None = {} if tells_cuts else None
        self._seen: dict[str, Box] = {}
        self._observed: list[str] = []
        self._in_loops: list[str] = []
        self._watched: list[str] = []
        # Read before the program runs. What a step is computed from again, as jax.checkpoint does,
        # must be what it was.
        with as_arguments():
            self._before = {key: one.state for key, one in statistics.items()}
        for key, one in statistics.items():
            if key.endswith(GRADIENT):
                one.state = one.average.begin(self._before[key])
                continue
            shape = self._before[key].shape
            # A branch that is never taken leaves these bounds, which are not finite.
            nothing: Any = [np.full(shape, bound, np.float32) for bound in (np.inf, -np.inf)]
            nothing = qn.Calibration(None if one.symmetric else nothing[0], nothing[1])
            box = _box(one)
            self._seen[key] = seen = box.beside(nothing)
            # A compiled program has the same Box in each call, so each call begins with these.
            seen.set(nothing)
            if self._cuts is not None:
                self._cuts[key] = box.beside(np.zeros((), np.float32))
                self._cuts[key].set(np.zeros((), np.float32))

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Run the program whose operations are observed.

        Raises:
            QuantizationError: JAX can't write there. For example, ``vmap`` maps a branch in which
                an operation is observed. It would compute all branches for all examples, and JAX
                does not say which one counts.
        """
        try:
            yield
        except (AssertionError, NotImplementedError, TypeError) as error:
            found = explained(error, self._observed, self._in_loops, self._watched)
            if found is None:
                raise
            raise found from error

    def observe(self, site: Site) -> None:
        """Record the ranges of a site's static operands."""
        if site.call.op_id not in self._observed:
            self._observed.append(site.call.op_id)
            if is_in_loop(site):
                self._in_loops.append(site.call.op_id)
        for side in (0, 1):
            # An empty batch has no range.
            if has_range(site, side, self._trains) and site.operands[side].size:
                key = key_at(self._statistics, site, side)
                seen = self._seen[key]
                before, found = seen.get(), measure(site, side)
                if self._cuts is not None:
                    cut = self._cuts[key]
                    cut.set(jnp.maximum(cut.get(), cut_off(site, side, found)))
                place = Place.of(site, before, site.operands[side].ndim)
                old, lower = place.take(before), None
                if found.lower is not None and old.lower is not None:
                    lower = jnp.minimum(old.lower, found.lower)
                new = qn.Calibration(lower, jnp.maximum(old.upper, found.upper))
                seen.set(place.put(before, new))

    def calibrations(self, site: Site) -> tuple[qn.Calibration | None, qn.Calibration | None]:
        """Return the ranges of both operands so far, this call included."""

        def one(side: int) -> qn.Calibration | None:
            how = site.hows[side]
            if how is None or not has_range(site, side, self._trains):
                return None
            key = key_at(self._statistics, site, side)
            seen = self._seen[key].get()
            place = Place.of(site, seen, site.operands[side].ndim)
            seen = place.take(seen if place.is_one else filled(seen))
            state, first = place.state(self._before[key]), qn.get_qtype(how.qtype).qmax
            return place.joined(self._statistics[key].average.during(state, seen, first))

        return one(0), one(1)

    def gradient(self, site: Site) -> qn.Calibration:
        """Return the range of a site's incoming gradient: that of the calls before."""
        key = gradient_key_at(self._statistics, site)
        found = self._statistics[key].average.get(self._before[key])
        place = Place.of(site, found)
        return scalar(place.joined(place.take(found)))

    def watched(self, site: Site, y: jax.Array) -> jax.Array:
        """Return a site's result, whose gradient is observed by the backward pass."""
        key = gradient_key_at(self._statistics, site)
        op_id, box = site.call.op_id, _box(self._statistics[key])
        around, instead = set(box.around()), ""
        if "shard_map" in around:
            where = "in a shard_map"
            instead = "Apply the provider inside of it, with the statistics as an argument. Or: "
        elif around & {"cond", "switch"}:
            where = "in a lax.cond or lax.switch"
        elif is_in_loop(site) or "while_body" in around:
            where = "in a loop of unknown length"
        else:
            where = None
        if where is not None:
            return refused(f"the gradient of {op_id} can't be recorded {where}", instead, y)
        self._watched.append(op_id)
        nothing: Any = np.zeros(self._before[key].shape, np.float32)
        place = Place.of(site, qn.Calibration(None, nothing))
        return watched(op_id, self._statistics[key], place, y)

    def cuts(self) -> dict[str, jax.Array]:
        """Return the largest share of each activation that its range cuts off, by key."""
        assert self._cuts is not None
        return {key: box.get() for key, box in self._cuts.items()}

    def finish(self) -> None:
        """Add the call to the statistics."""
        for key, seen in self._seen.items():
            self._statistics[key].observe(filled(seen.get()))


def _box(statistics: qn.Statistics) -> Box:
    (box,) = jax.tree.leaves(statistics, is_leaf=lambda x: isinstance(x, Box))
    return box
