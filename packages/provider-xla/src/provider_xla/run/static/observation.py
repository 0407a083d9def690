"""Observation: measures the static ranges of one call, forward and backward."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn
from hijax_trace import Box

from ...errors import QuantizationError
from ...program.sites import Site
from .ranges import GRADIENT, cut_off, has_range, is_in_loop, max_of_all, measure
from .statistics import Place, Statistics, as_arguments, filled, gradient_key_at, key_at, scalar


def is_of_jax(error: Exception, caller: str = "jax._src") -> bool:
    """Return whether JAX raised an error, not the program.

    JAX may have removed the frames of the module that called it.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).startswith(("jax._src", caller))


def explained(
    error: Exception, observed: Sequence[str], in_loops: Sequence[str], watched: Sequence[str]
) -> QuantizationError | None:
    """Return an error for one of JAX's, or of a Box's, about what can't be written; else None.

    ``in_loops`` are the ids that are in a loop whose length only a run can tell.
    """
    text, ops = str(error), observed
    instead = "give a rule for these operations act_static_scale=False"
    if "differs between the examples" in text:
        what = (
            "A static range can't be measured in a lax.cond or lax.switch whose condition differs "
            "between the examples of jax.vmap"
        )
        instead = f"Run the branches outside of vmap (jax.lax.map), or {instead}"
        ops = [one for one in ops if "cond(" in one or "switch(" in one] or ops
    elif "inside of shard_map" in text and ops:
        what = (
            "A static range can't be measured where the program differentiates a shard_map, or "
            "differentiates inside of one"
        )
        instead = (
            "Put jax.jit around the function that is differentiated, or apply the provider "
            "inside of the shard_map, with the statistics as an argument"
        )
        ops = ops[-1:]
    elif watched and ("forward-mode" in text or "custom_lin" in text):
        what, ops = "Gradients can't be recorded under jax.jvp", watched
        instead = WITHOUT_GRADIENTS
    elif isinstance(error, AssertionError) and in_loops and is_of_jax(error):
        what = (
            "A static range can't be measured in a loop that ends at another step for each "
            "example of jax.vmap"
        )
        instead = f"Run the loop outside of vmap (jax.lax.map), or {instead}"
        ops = in_loops
    else:
        return None
    return QuantizationError(f"{what}, got {', '.join(dict.fromkeys(ops))}. {instead}.")


WITHOUT_GRADIENTS = (
    "Give this operation a rule with bwd_static_scale=False, or use apply(..., update=False)"
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def watched(op_id: str, statistics: qn.Statistics, place: Place, y: jax.Array) -> jax.Array:
    """Return ``y``; the backward pass adds the largest magnitude of its gradient to statistics."""
    return y


def _watched_forward(
    op_id: str, statistics: qn.Statistics, place: Place, y: jax.Array
) -> tuple[Any, Any]:
    return y, (statistics, place)


def _watched_backward(op_id: str, kept: Any, g: jax.Array) -> tuple[None, None, jax.Array]:
    statistics, place = kept
    g = refused(f"{op_id} can't have a second derivative, since its backward pass writes", "", g)
    seen = jnp.abs(lax.stop_gradient(g))
    found = qn.Calibration(None, max_of_all(jnp.max(seen, initial=0).astype(np.float32)))
    state = statistics.state  # what other steps of a loop have left
    new = statistics.average.record(place.state(state), found)
    statistics.state = place.put_state(state, new)
    return None, None, g


watched.defvjp(_watched_forward, _watched_backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def refused(why: str, instead: str, y: jax.Array) -> jax.Array:
    """Return ``y``, which raises an error if it is differentiated."""
    return y


@refused.defjvp
def _refused_jvp(why: str, instead: str, primals: Any, tangents: Any) -> Any:
    raise QuantizationError(f"With bwd_static_scale=True {why}. {instead}{WITHOUT_GRADIENTS}.")


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
