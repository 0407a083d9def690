"""Static ranges: statistics of activations, by site."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

import quant_numerics as qn
from hijax_trace import Box
from interception_core import JaxtapError, Step

from ..errors import QuantizationError, QuantizationWarning
from ..program.sites import SIDES, Site
from ..rules.rule import MOST_STEPS
from .stored import beside

Statistics = Mapping[str, Any]
"""By site and side (``"mlp/dot:0#lhs"``): ``quant_numerics.Statistics``, or a Calibration."""


class StaticRange(NamedTuple):
    """An activation with a static range.

    Attributes:
        ndim: its number of axes.
        symmetric: whether the range has no lower bound.
        steps: lengths of the loops whose steps have a range each, the outermost first.
    """

    ndim: int
    symmetric: bool
    steps: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of its bounds."""
        return (*self.steps, *(1,) * self.ndim)


def steps_of(site: Site) -> tuple[Step, ...]:
    """Return the loops around a site whose steps have a range each."""
    found = tuple(step for step in site.call.steps or () if step.length is not None)
    asked = site.rule.static_range
    if asked == "joined" or (asked is None and _count(found) > MOST_STEPS):
        return ()
    return found


def _count(steps: Sequence[Step]) -> int:
    return math.prod(step.length or 1 for step in steps)


def measure(site: Site, side: int) -> qn.Calibration:
    """Return an activation's range, float32 of shape (1, ..., 1).

    Each bound is the extreme over all axes but the rule's batch axes, and the mean over those and
    over the examples that the program maps by ``vmap``.

    Args:
        site: the operation.
        side: which operand the activation is, 0 or 1.
    """
    x, axes = _activation(site, side), _examples(site, side)
    found = _extremes(site, side, x, axes)
    return jax.tree.map(lambda bound: _mean(jnp.mean(bound, axis=axes, keepdims=True)), found)


def _activation(site: Site, side: int) -> jax.Array:
    """Return what is quantized for an operand, without its derivative."""
    x, held = jax.lax.stop_gradient(site.operands[side]), beside(site, side)
    return x if held is None else held.activation(site.contraction, 1 - side, x)


def _examples(site: Site, side: int) -> tuple[int, ...]:
    """Return the axes of an operand of which the mean of the ranges is taken."""
    ndim = site.operands[side].ndim
    batch = {a % ndim for a in site.rule.act_batch_axes if -ndim <= a < ndim}
    return tuple(sorted(batch - set(site.contraction.shared(side, ndim))))


def _extremes(site: Site, side: int, x: jax.Array, axes: tuple[int, ...]) -> qn.Calibration:
    how = site.hows[side]
    assert how is not None
    return qn.calibrate(x, how.qtype, channel_axes=axes, method=how.method)


def _cut_off(site: Site, side: int, bounds: qn.Calibration) -> jax.Array:
    """Return the share of an activation's magnitude that bounds cut off, float32.

    A count of the numbers outside would say more of small activations: the mean of the largest
    magnitudes is below about half of these, by little.
    """
    x, how = _activation(site, side), site.hows[side]
    assert how is not None
    method = qn.parse_calibration_method(how.method)
    if method.clips and method.name != "percentile":
        return jnp.zeros((), np.float32)  # as its rule says
    lower = -bounds.upper if bounds.lower is None else bounds.lower
    x = x.astype(np.float32)
    lost = jnp.abs(x - jnp.clip(x, lower, bounds.upper)).mean()
    return _mean(lost / jnp.maximum(jnp.abs(x).mean(), np.finfo(np.float32).tiny))


@custom_vmap
def _mean(x: jax.Array) -> jax.Array:
    """Return ``x``, averaged over mapped examples."""
    return x


@_mean.def_vmap
def _mean_rule(size: int, is_batched: Sequence[bool], x: jax.Array) -> tuple[jax.Array, bool]:
    return _mean(x.mean(0) if is_batched[0] else x), False


class Observation:
    """The static ranges of one call of a program.

    Each step of a loop of known length has its own range, if its rule has it so. Others are joined
    by their extremes: a mean over steps would clip the steps with the largest values. Calls are
    averaged.

    Args:
        statistics: ``quant_numerics.Statistics`` by site and side, to which the call is added.
        tells_cuts: whether ``cuts`` can be asked for.
    """

    def __init__(self, statistics: Statistics, tells_cuts: bool = False):
        self._statistics = statistics
        self._cuts: dict[str, Box] | None = {} if tells_cuts else None
        self._seen: dict[str, Box] = {}
        self._observed: list[str] = []
        for key, one in statistics.items():
            shape = one.state.total.upper.shape
            # A branch that is never taken leaves these bounds, which are not finite.
            nothing: Any = [np.full(shape, bound, np.float32) for bound in (np.inf, -np.inf)]
            nothing = qn.Calibration(None if one.symmetric else nothing[0], nothing[1])
            (box,) = jax.tree.leaves(one, is_leaf=lambda x: isinstance(x, Box))
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
            QuantizationError: ``vmap`` maps a branch in which an operation is observed. It would
                compute all branches for all examples, and JAX does not say which one counts.
        """
        try:
            yield
        except NotImplementedError as error:
            if "vmap-of-cond" not in str(error):
                raise
            in_branch = [one for one in self._observed if "cond(" in one or "switch(" in one]
            raise QuantizationError(
                "A static range can't be measured in a lax.cond or lax.switch under jax.vmap, got "
                f"{', '.join(in_branch or self._observed)}. Run the branches outside of vmap "
                "(jax.lax.map), or give a rule for these operations act_static_scale=False."
            ) from error

    def observe(self, site: Site) -> None:
        """Record the ranges of a site's static activations."""
        if site.call.op_id not in self._observed:
            self._observed.append(site.call.op_id)
        for side in (0, 1):
            # An empty batch has no range.
            if site.is_static(side) and site.operands[side].size:
                key = _key(self._statistics, site, side)
                seen = self._seen[key]
                before, found = seen.get(), measure(site, side)
                if self._cuts is not None:
                    cut = self._cuts[key]
                    cut.set(jnp.maximum(cut.get(), _cut_off(site, side, found)))
                place = _Place.of(site, side, before)
                old, lower = place.take(before), None
                if found.lower is not None and old.lower is not None:
                    lower = jnp.minimum(old.lower, found.lower)
                new = qn.Calibration(lower, jnp.maximum(old.upper, found.upper))
                seen.set(place.put(before, new))

    def calibrations(self, site: Site) -> tuple[qn.Calibration | None, qn.Calibration | None]:
        """Return the ranges of both operands so far, this call included."""

        def one(side: int) -> qn.Calibration | None:
            if not site.is_static(side):
                return None
            key = _key(self._statistics, site, side)
            found = self._statistics[key]
            state, seen = found.state, self._seen[key].get()
            place = _Place.of(site, side, seen)
            seen = place.take(seen if place.is_one else _filled(seen))
            state = state._replace(total=place.take(state.total))
            average = found.average
            return place.joined(average.get(average.update(state, seen)))

        return one(0), one(1)

    def cuts(self) -> dict[str, jax.Array]:
        """Return the largest share of each activation that its range cuts off, by key."""
        assert self._cuts is not None
        return {key: box.get() for key, box in self._cuts.items()}

    def finish(self) -> None:
        """Add the call to the statistics."""
        for key, one in self._statistics.items():
            one.observe(_filled(self._seen[key].get()))


def _filled(seen: qn.Calibration) -> qn.Calibration:
    """Return bounds where unseen steps take those of all seen."""

    def fill(bound: jax.Array, unseen: float, extreme: Any) -> jax.Array:
        return jnp.where(bound == unseen, extreme(bound), bound)

    lower = None if seen.lower is None else fill(seen.lower, jnp.inf, jnp.min)
    return qn.Calibration(lower, fill(seen.upper, -jnp.inf, jnp.max))


class _Place(NamedTuple):
    """A site's place in bounds of shape (*steps, 1, ..., 1).

    Attributes:
        index: the number of the step in each loop; None for all of them.
    """

    index: tuple[Any, ...]

    @classmethod
    def of(cls, site: Site, side: int, bounds: qn.Calibration) -> _Place:
        """Return the place of a site. Loops of other lengths are joined."""
        lengths = bounds.upper.shape[: bounds.upper.ndim - site.operands[side].ndim]
        if not lengths:
            return cls(())
        steps = [step for step in site.call.steps or () if step.length is not None]
        if tuple(step.length for step in steps) != lengths:
            return cls((None,) * len(lengths))
        return cls(tuple(step.index for step in steps))

    @property
    def is_one(self) -> bool:
        """Return whether it is a single step."""
        return all(index is not None for index in self.index)

    def take(self, bounds: qn.Calibration) -> qn.Calibration:
        """Return a step's bounds, with its axes of size 1."""
        if not self.index:
            return bounds

        def part(bound: jax.Array) -> jax.Array:
            sizes = [n if i is None else 1 for n, i in zip(bound.shape, self.index, strict=False)]
            sizes += bound.shape[len(sizes) :]
            return lax.dynamic_slice(bound, self._starts(bound), sizes)

        return jax.tree.map(part, bounds)

    def put(self, bounds: qn.Calibration, part: qn.Calibration) -> qn.Calibration:
        """Return bounds with those of the steps replaced."""
        if not self.index:
            return part

        def replaced(bound: jax.Array, new: jax.Array) -> jax.Array:
            return lax.dynamic_update_slice(bound, new, self._starts(bound))

        return jax.tree.map(replaced, bounds, part)

    def joined(self, part: qn.Calibration) -> qn.Calibration:
        """Return the range that holds those of the steps, without their axes."""
        axes = tuple(range(len(self.index)))
        if not axes:
            return part
        lower = None if part.lower is None else jnp.min(part.lower, axes)
        return qn.Calibration(lower, jnp.max(part.upper, axes))

    def _starts(self, bound: jax.Array) -> list[Any]:
        zero = np.int32(0)
        starts = [zero if index is None else index for index in self.index]
        return [*starts, *[zero] * (bound.ndim - len(starts))]


def read(statistics: Statistics) -> dict[str, qn.Calibration]:
    """Return the ranges that statistics stand for now.

    They are read before the program runs. Read where they are used, they might be state in a
    branch, of which JAX has no derivative.
    """
    return {
        key: one if isinstance(one, qn.Calibration) else one.calibration()
        for key, one in statistics.items()
    }


def calibrations(
    statistics: Statistics | None, site: Site
) -> tuple[qn.Calibration | None, qn.Calibration | None]:
    """Return the static ranges of both operands, where they have one.

    Raises:
        JaxtapError: an operand needs a range, and the statistics have none for it.
    """

    def one(side: int) -> qn.Calibration | None:
        if not site.is_static(side):
            return None
        found = _of(statistics, site, side)
        found = found if isinstance(found, qn.Calibration) else found.calibration()
        place = _Place.of(site, side, found)
        range_, unseen = place.joined(place.take(found)), is_unseen(found)
        if not isinstance(unseen, np.ndarray):  # the ranges are arguments of the program
            return _or_own(range_, site, side)
        if unseen.all():
            _tell_unseen(site, side)
            return None
        return _or_own(range_, site, side) if unseen.any() else range_

    return one(0), one(1)


def is_unseen(bounds: qn.Calibration) -> Any:
    """Return where bounds hold nothing but 0: no data was seen there, or zeros alone.

    Returns:
        A bool array like the bounds; a NumPy array if they are known.
    """
    lower, upper = bounds
    if any(isinstance(x, jax.core.Tracer) for x in bounds):
        return ~(upper > 0) if lower is None else ~((upper > 0) | (lower < 0))
    upper = np.asarray(upper)
    return ~(upper > 0) if lower is None else ~((upper > 0) | (np.asarray(lower) < 0))


def _or_own(bounds: qn.Calibration, site: Site, side: int) -> qn.Calibration:
    """Return bounds, or those of the activation where they hold nothing but 0."""
    if not site.operands[side].size:
        return bounds

    def own() -> qn.Calibration:
        found = _extremes(site, side, _activation(site, side), ())
        return jax.tree.map(lambda x, like: x.astype(like.dtype).reshape(like.shape), found, bounds)

    return lax.cond(is_unseen(bounds).all(), own, lambda: bounds)


def _tell_unseen(site: Site, side: int) -> None:
    text = (
        f"No calibration batch reached {site.call.op_id}, or its {SIDES[side]} was 0 in all of "
        "them, so that there is no static range for it."
    )
    if site.rule.unseen_range == "error":
        raise QuantizationError(
            f"{text} Calibrate with batches that reach it, or give its rule unseen_range='dynamic'."
        )
    warnings.warn(
        f"{text} It has a dynamic one. Calibrate with batches that reach it.",
        QuantizationWarning,
        stacklevel=2,
    )


def key_of(key: str, transformed: bool) -> str:
    """Return the statistics key of an operand, transformed ones apart."""
    return f"{key} (transformed)" if transformed else key


def _of(statistics: Statistics | None, site: Site, side: int) -> Any:
    key = _key(statistics, site, side)
    assert statistics is not None
    return statistics[key]


def _key(statistics: Statistics | None, site: Site, side: int) -> str:
    """Return an operand's statistics key; raise if it has none."""
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
