"""Static ranges: statistics of activations, and in training of parameters and gradients."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from ..rules.qt_rule import QtRule
from ..rules.rule import MOST_STEPS
from .stored import beside

Statistics = Mapping[str, Any]
"""By site and side (``"mlp/dot:0#lhs"``): ``quant_numerics.Statistics``, or a Calibration."""


_MEAN = qn.MovingAverage()


class StaticRange(NamedTuple):
    """What has a static range.

    Attributes:
        ndim: its number of axes; 0 for a gradient, whose range has none.
        symmetric: whether the range has no lower bound.
        steps: lengths of the loops whose steps have a range each, the outermost first.
        average: how the range follows from those of calls.
    """

    ndim: int
    symmetric: bool
    steps: tuple[int, ...]
    average: qn.MovingAverage | qn.AmaxHistory

    @classmethod
    def of(cls, site: Site, ndim: int, symmetric: bool = True) -> StaticRange:
        """Return the range of something at a site."""
        steps = tuple(step.length or 0 for step in steps_of(site))
        return cls(ndim, symmetric, steps, _average(site))

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of its bounds."""
        return (*self.steps, *(1,) * self.ndim)


def _average(site: Site) -> qn.MovingAverage | qn.AmaxHistory:
    """Return how the static ranges of a site follow from those of calls."""
    return site.rule.static_average if isinstance(site.rule, QtRule) else _MEAN


def has_range(site: Site, side: int, trains: bool = True) -> bool:
    """Return whether an operand has a static range.

    Args:
        site: the operation.
        side: which operand, 0 or 1.
        trains: whether it is quantized in training, where parameters may have one, too.
    """
    if site.weights[side] is None:
        return site.is_static(side)
    rule, how = site.rule, site.hows[side]
    if site.is_linear or not trains:  # what derivative rules do, no plan has
        return False
    return how is not None and isinstance(rule, QtRule) and rule.weight_static_scale


def trained_hows(site: Site) -> tuple[qn.HowToQuantize | None, qn.HowToQuantize | None]:
    """Return how both operands are quantized in training.

    What has grown since the steps before lies out of their range, but isn't meant to be cut off.
    """
    if not isinstance(_average(site), qn.AmaxHistory):
        return site.hows
    left, right = (how and dataclasses.replace(how, masks=False) for how in site.hows)
    return left, right


def has_gradient_range(site: Site) -> bool:
    """Return whether the incoming gradient of a site has a static range, in training."""
    rule = site.rule
    if not (isinstance(rule, QtRule) and rule.bwd_static_scale) or site.is_linear:
        return False
    quantized = [rule.backward(weight is not None) for weight in site.weights]
    return any(quantized) and site.contraction.trains


def gradient_key(site: Site) -> str:
    """Return the key of the statistics of a site's incoming gradient."""
    return f"{site.call.op_id}{_GRADIENT}"


_GRADIENT = "#gradient"


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
    """Return an operand's range, float32 of shape (1, ..., 1).

    Each bound is the extreme over all axes but the rule's batch axes, and the mean over those and
    over the examples that the program maps by ``vmap``. It is the extreme over all if there are no
    batch axes, for delayed scaling, and of a parameter.

    Args:
        site: the operation.
        side: which operand, 0 or 1.
    """
    x, axes = _activation(site, side), _examples(site, side)
    found = _extremes(site, side, x, axes)
    if isinstance(_average(site), qn.AmaxHistory) or not site.rule.act_batch_axes:
        lower = None if found.lower is None else -_max(-found.lower)
        return qn.Calibration(lower, _max(found.upper))
    cut = _cut_axes(site, side)
    lower = None if found.lower is None else -_of_devices(-found.lower, lax.pmax, cut)
    found = qn.Calibration(lower, _of_devices(found.upper, lax.pmax, cut))
    return jax.tree.map(lambda bound: _mean(jnp.mean(bound, axis=axes, keepdims=True)), found)


def _cut_axes(site: Site, side: int) -> tuple[str, ...]:
    """Return the mesh axes of a ``shard_map`` that cut what an operand's weight contracts.

    Along others devices have different examples.
    """
    other = 1 - side
    if site.weights[other] is None:
        return ()
    return tuple(sorted(_varying(site.operands[side]) & _varying(site.operands[other])))


def _activation(site: Site, side: int) -> jax.Array:
    """Return what is quantized for an operand, without its derivative."""
    x, held = jax.lax.stop_gradient(site.operands[side]), beside(site, side)
    return x if held is None else held.activation(site.contraction, 1 - side, x)


def _examples(site: Site, side: int) -> tuple[int, ...]:
    """Return the axes of an operand of which the mean of the ranges is taken."""
    ndim = site.operands[side].ndim
    if site.weights[side] is not None or isinstance(_average(site), qn.AmaxHistory):
        return ()
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


def _mean(x: jax.Array) -> jax.Array:
    """Return ``x``, averaged over mapped examples, and over the devices of a ``shard_map``."""
    return _over_devices(_mean_of_examples(x), lax.pmean)


def _max(x: jax.Array) -> jax.Array:
    """Return ``x``, the largest over mapped examples, and over the devices of a ``shard_map``."""
    return _over_devices(_max_of_examples(x), lax.pmax)


def _over_examples(reduce: Callable[..., jax.Array]) -> Callable[[jax.Array], jax.Array]:
    """Return the identity, which reduces mapped examples."""

    @custom_vmap
    def one(x: jax.Array) -> jax.Array:
        return x

    @one.def_vmap
    def rule(size: int, is_batched: Sequence[bool], x: jax.Array) -> tuple[jax.Array, bool]:
        return one(reduce(x, 0) if is_batched[0] else x), False

    return one


_mean_of_examples, _max_of_examples = _over_examples(jnp.mean), _over_examples(jnp.max)


def _over_devices(x: jax.Array, reduce: Callable[..., jax.Array]) -> jax.Array:
    """Return what all devices that run the program of one agree on."""
    return _of_devices(x, reduce, tuple(jax.sharding.get_abstract_mesh().manual_axes))


def _of_devices(x: jax.Array, reduce: Callable[..., jax.Array], axes: Sequence[str]) -> jax.Array:
    """Return ``x``, reduced over the devices along mesh axes of a ``shard_map``."""
    if not axes:
        return x
    missing = tuple(sorted(set(axes) - _varying(x)))
    return reduce(lax.pcast(x, missing, to="varying") if missing else x, tuple(axes))


def _varying(x: jax.Array) -> frozenset[str]:
    """Return the mesh axes along which devices may have different values, if JAX knows."""
    return frozenset(getattr(getattr(jax.typeof(x), "mat", None), "varying", ()))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _watched(op_id: str, statistics: qn.Statistics, place: _Place, y: jax.Array) -> jax.Array:
    """Return ``y``; the backward pass adds the largest magnitude of its gradient to statistics."""
    return y


def _watched_forward(
    op_id: str, statistics: qn.Statistics, place: _Place, y: jax.Array
) -> tuple[Any, Any]:
    return y, (statistics, place)


def _watched_backward(op_id: str, kept: Any, g: jax.Array) -> tuple[None, None, jax.Array]:
    statistics, place = kept
    g = _refused(f"{op_id} can't have a second derivative, since its backward pass writes", "", g)
    seen = jnp.abs(lax.stop_gradient(g))
    found = qn.Calibration(None, _max(jnp.max(seen, initial=0).astype(np.float32)))
    state = statistics.state  # what other steps of a loop have left
    new = statistics.average.record(place.state(state), found)
    statistics.state = place.put_state(state, new)
    return None, None, g


_watched.defvjp(_watched_forward, _watched_backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _refused(why: str, instead: str, y: jax.Array) -> jax.Array:
    """Return ``y``, which raises an error if it is differentiated."""
    return y


@_refused.defjvp
def _refused_jvp(why: str, instead: str, primals: Any, tangents: Any) -> Any:
    raise QuantizationError(f"With bwd_static_scale=True {why}. {instead}{_WITHOUT_GRADIENTS}.")


_WITHOUT_GRADIENTS = (
    "Give this operation a rule with bwd_static_scale=False, or use apply(..., update=False)"
)


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
        with _as_arguments():
            self._before = {key: one.state for key, one in statistics.items()}
        for key, one in statistics.items():
            if key.endswith(_GRADIENT):
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
            found = self._explained(error)
            if found is None:
                raise
            raise found from error

    def _explained(self, error: Exception) -> QuantizationError | None:
        """Return an error for one of JAX's, or of a Box's, about what can't be written."""
        text, ops = str(error), self._observed
        instead = "give a rule for these operations act_static_scale=False"
        if "vmap-of-cond" in text:
            what = "A static range can't be measured in a lax.cond or lax.switch under jax.vmap"
            instead = f"Run the branches outside of vmap (jax.lax.map), or {instead}"
            ops = [one for one in ops if "cond(" in one or "switch(" in one] or ops
        elif "cond partial-eval" in text:
            what = "A static range can't be measured in a branch of a loop that is differentiated"
            instead = (
                "Measure with calls that are not differentiated, and train with "
                f"apply(..., update=False), or {instead}"
            )
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
        elif self._watched and ("forward-mode" in text or "custom_lin" in text):
            what, ops = "Gradients can't be recorded under jax.jvp", self._watched
            instead = _WITHOUT_GRADIENTS
        elif isinstance(error, AssertionError) and self._in_loops and is_of_jax(error):
            what = (
                "A static range can't be measured in a loop that ends at another step for each "
                "example of jax.vmap"
            )
            instead = f"Run the loop outside of vmap (jax.lax.map), or {instead}"
            ops = self._in_loops
        else:
            return None
        return QuantizationError(f"{what}, got {', '.join(dict.fromkeys(ops))}. {instead}.")

    def observe(self, site: Site) -> None:
        """Record the ranges of a site's static operands."""
        if site.call.op_id not in self._observed:
            self._observed.append(site.call.op_id)
            if _is_in_loop(site):
                self._in_loops.append(site.call.op_id)
        for side in (0, 1):
            # An empty batch has no range.
            if has_range(site, side, self._trains) and site.operands[side].size:
                key = _key(self._statistics, site, side)
                seen = self._seen[key]
                before, found = seen.get(), measure(site, side)
                if self._cuts is not None:
                    cut = self._cuts[key]
                    cut.set(jnp.maximum(cut.get(), _cut_off(site, side, found)))
                place = _Place.of(site, before, site.operands[side].ndim)
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
            key = _key(self._statistics, site, side)
            seen = self._seen[key].get()
            place = _Place.of(site, seen, site.operands[side].ndim)
            seen = place.take(seen if place.is_one else _filled(seen))
            state, first = place.state(self._before[key]), qn.get_qtype(how.qtype).qmax
            return place.joined(self._statistics[key].average.during(state, seen, first))

        return one(0), one(1)

    def gradient(self, site: Site) -> qn.Calibration:
        """Return the range of a site's incoming gradient: that of the calls before."""
        key = _gradient_key(self._statistics, site)
        found = self._statistics[key].average.get(self._before[key])
        place = _Place.of(site, found)
        return _scalar(place.joined(place.take(found)))

    def watched(self, site: Site, y: jax.Array) -> jax.Array:
        """Return a site's result, whose gradient is observed by the backward pass."""
        key = _gradient_key(self._statistics, site)
        op_id, box = site.call.op_id, _box(self._statistics[key])
        around, instead = set(box.around()), ""
        if "shard_map" in around:
            where = "in a shard_map"
            instead = "Apply the provider inside of it, with the statistics as an argument. Or: "
        elif around & {"cond", "switch"}:
            where = "in a lax.cond or lax.switch"
        elif _is_in_loop(site) or "while_body" in around:
            where = "in a loop of unknown length"
        else:
            where = None
        if where is not None:
            return _refused(f"the gradient of {op_id} can't be recorded {where}", instead, y)
        self._watched.append(op_id)
        nothing: Any = np.zeros(self._before[key].shape, np.float32)
        place = _Place.of(site, qn.Calibration(None, nothing))
        return _watched(op_id, self._statistics[key], place, y)

    def cuts(self) -> dict[str, jax.Array]:
        """Return the largest share of each activation that its range cuts off, by key."""
        assert self._cuts is not None
        return {key: box.get() for key, box in self._cuts.items()}

    def finish(self) -> None:
        """Add the call to the statistics."""
        for key, seen in self._seen.items():
            self._statistics[key].observe(_filled(seen.get()))


def _box(statistics: qn.Statistics) -> Box:
    (box,) = jax.tree.leaves(statistics, is_leaf=lambda x: isinstance(x, Box))
    return box


def _is_in_loop(site: Site) -> bool:
    """Return whether a loop around a site has a length that only a run can tell."""
    return any(step.length is None for step in site.call.steps or ())


def is_of_jax(error: Exception, caller: str = "jax._src") -> bool:
    """Return whether JAX raised an error, not the program.

    Args:
        error: the error.
        caller: the module that called JAX, whose own frames JAX may have removed.
    """
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")).startswith(("jax._src", caller))


@contextlib.contextmanager
def _as_arguments() -> Iterator[None]:
    """Read statistics.

    Raises:
        QuantizationError: they are closed over inside of ``shard_map``.
    """
    try:
        yield
    except NotImplementedError as error:
        raise QuantizationError(
            "Statistics that provider.apply uses inside of shard_map must be an argument of the "
            "function that shard_map maps, got some that it closes over. Write jax.shard_map("
            "lambda params, x, statistics: provider.apply(fn, statistics)(params, x), in_specs="
            "(..., jax.P())), and call it under jax.jit."
        ) from error


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
    def of(cls, site: Site, bounds: qn.Calibration, ndim: int = 0) -> _Place:
        """Return the place of a site in bounds of an array. Loops of other lengths are joined."""
        lengths = bounds.upper.shape[: bounds.upper.ndim - ndim]
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

    def state(self, state: Any) -> Any:
        """Return the part of a state of statistics that is about the steps."""
        return type(state)(
            *(self.take(part) if isinstance(part, qn.Calibration) else part for part in state)
        )

    def put_state(self, state: Any, part: Any) -> Any:
        """Return a state of statistics with that part replaced."""
        pairs = zip(state, part, strict=True)
        return type(state)(
            *(self.put(old, new) if isinstance(old, qn.Calibration) else new for old, new in pairs)
        )

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
    with _as_arguments():
        return {
            key: one if isinstance(one, qn.Calibration) else one.calibration()
            for key, one in statistics.items()
        }


def calibrations(
    statistics: Statistics | None, site: Site, trains: bool = False
) -> tuple[qn.Calibration | None, qn.Calibration | None]:
    """Return the static ranges of both operands, where they have one.

    Args:
        statistics: what has been observed.
        site: the operation.
        trains: as in ``has_range``.

    Raises:
        JaxtapError: an operand needs a range, and the statistics have none for it.
    """

    def one(side: int) -> qn.Calibration | None:
        if not has_range(site, side, trains):
            return None
        found = _bounds(statistics, _key(statistics, site, side))
        place = _Place.of(site, found, site.operands[side].ndim)
        range_, unseen = place.joined(place.take(found)), is_unseen(found)
        if not isinstance(unseen, np.ndarray):  # the ranges are arguments of the program
            return _or_own(range_, site, side)
        if unseen.all():
            _tell_unseen(site, SIDES[side])
            return None
        return _or_own(range_, site, side) if unseen.any() else range_

    return one(0), one(1)


def gradient_range(statistics: Statistics | None, site: Site) -> qn.Calibration | None:
    """Return the static range of a site's incoming gradient; None if none is known.

    One that is known when the program runs has scale 1 until then.

    Raises:
        JaxtapError: the statistics have none for it.
    """
    found = _bounds(statistics, _gradient_key(statistics, site))
    place, unseen = _Place.of(site, found), is_unseen(found)
    if isinstance(unseen, np.ndarray) and unseen.all():
        _tell_unseen(site, "gradient")
        return None
    return _scalar(place.joined(place.take(found)))


def _scalar(bounds: qn.Calibration) -> qn.Calibration:
    """Return the range of a gradient, of shape ()."""
    return qn.Calibration(None, bounds.upper.reshape(()))


def is_unseen(bounds: qn.Calibration) -> Any:
    """Return where bounds hold nothing but 0: no data was seen there, or zeros alone.

    Returns:
        A bool array like the bounds; a NumPy array if they are known.
    """
    lower, upper = bounds
    if any(isinstance(x, jax.core.Tracer) for x in bounds):
        return ~(upper > 0) if lower is None else ~((upper > 0) | (lower < 0))
    below = False if lower is None else np.asarray(lower) < 0
    return np.asarray(~((np.asarray(upper) > 0) | below))


def _or_own(bounds: qn.Calibration, site: Site, side: int) -> qn.Calibration:
    """Return bounds, or those of the activation where they hold nothing but 0."""
    if not site.operands[side].size:
        return bounds

    def own() -> qn.Calibration:
        found = _extremes(site, side, _activation(site, side), ())
        return jax.tree.map(lambda x, like: x.astype(like.dtype).reshape(like.shape), found, bounds)

    return lax.cond(is_unseen(bounds).all(), own, lambda: bounds)


def _tell_unseen(site: Site, what: str) -> None:
    text = (
        f"No calibration batch reached {site.call.op_id}, or its {what} was 0 in all of "
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


def _bounds(statistics: Statistics | None, key: str) -> qn.Calibration:
    found = (statistics or {})[key]
    return found if isinstance(found, qn.Calibration) else found.calibration()


def _key(statistics: Statistics | None, site: Site, side: int) -> str:
    """Return an operand's statistics key; raise if it has none."""
    key = key_of(site.key(side), beside(site, side) is not None)
    return _checked(statistics, site, key, SIDES[side])


def _gradient_key(statistics: Statistics | None, site: Site) -> str:
    """Return the statistics key of an incoming gradient; raise if it has none."""
    return _checked(statistics, site, gradient_key(site), "gradient")


def _checked(statistics: Statistics | None, site: Site, key: str, what: str) -> str:
    if statistics is None:
        raise JaxtapError(
            f"The rule of {site.call.op_id} has static scales, and there are no statistics to take "
            f"the range of its {what} from. Measure them with plan.calibrate(fn, params, batches), "
            "or start with provider.init_statistics(...) for training, and pass them as "
            "statistics=."
        )
    if key not in statistics:
        known = ", ".join(sorted(statistics)) or "none"
        raise JaxtapError(
            f"There are no statistics for {key} (the {what} of {site.call.op_id}), only "
            f"for: {known}. They were made for another program, for other rules, or for parameters "
            "that no pass, or another one, has transformed: measure with those that are run."
        )
    return key
