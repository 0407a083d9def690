"""Statistics: the ranges that calls before have left, and the place of a loop's step in them."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn
from interception_core import JaxtapError

from ...errors import QuantizationError, QuantizationWarning
from ...program.sites import SIDES, Site
from .ranges import (
    activation_of,
    extremes,
    gradient_key,
    has_range,
    transforming,
    varying_axes,
    varying_over,
)


class Place(NamedTuple):
    """A site's place in bounds of shape (*steps, 1, ..., 1).

    Attributes:
        index: the number of the step in each loop; None for all of them.
    """

    index: tuple[Any, ...]

    @classmethod
    def of(cls, site: Site, bounds: qn.Calibration, ndim: int = 0) -> Place:
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


def filled(seen: qn.Calibration) -> qn.Calibration:
    """Return bounds where unseen steps take those of all seen."""

    def fill(bound: jax.Array, unseen: float, extreme: Any) -> jax.Array:
        return jnp.where(bound == unseen, extreme(bound), bound)

    lower = None if seen.lower is None else fill(seen.lower, jnp.inf, jnp.min)
    return qn.Calibration(lower, fill(seen.upper, -jnp.inf, jnp.max))


def scalar(bounds: qn.Calibration) -> qn.Calibration:
    """Return the range of a gradient, of shape ()."""
    return qn.Calibration(None, bounds.upper.reshape(()))


Statistics = Mapping[str, Any]
"""By site and side (``"mlp/dot:0#lhs"``): ``quant_numerics.Statistics``, or a Calibration."""


@contextlib.contextmanager
def as_arguments() -> Iterator[None]:
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


def read(statistics: Statistics) -> dict[str, qn.Calibration]:
    """Return the ranges that statistics stand for now.

    They are read before the program runs. Read where they are used, they might be state in a
    branch, of which JAX has no derivative.
    """
    with as_arguments():
        return {
            key: one if isinstance(one, qn.Calibration) else one.calibration()
            for key, one in statistics.items()
        }


def calibrations(
    statistics: Statistics | None, site: Site, trains: bool = False
) -> tuple[qn.Calibration | None, qn.Calibration | None]:
    """Return the static ranges of both operands, where they have one.

    Raises:
        JaxtapError: an operand needs a range, and the statistics have none for it.
    """

    def one(side: int) -> qn.Calibration | None:
        if not has_range(site, side, trains):
            return None
        found = _bounds(statistics, key_at(statistics, site, side))
        place = Place.of(site, found, site.operands[side].ndim)
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
    found = _bounds(statistics, gradient_key_at(statistics, site))
    place, unseen = Place.of(site, found), is_unseen(found)
    if isinstance(unseen, np.ndarray) and unseen.all():
        _tell_unseen(site, "gradient")
        return None
    return scalar(place.joined(place.take(found)))


def is_unseen(bounds: qn.Calibration) -> Any:
    """Return where bounds hold nothing but 0: no data was seen there, or zeros alone."""
    lower, upper = bounds
    if any(isinstance(x, jax.core.Tracer) for x in bounds):
        return ~(upper > 0) if lower is None else ~((upper > 0) | (lower < 0))
    below = False if lower is None else np.asarray(lower) < 0
    return np.asarray(~((np.asarray(upper) > 0) | below))


def _or_own(bounds: qn.Calibration, site: Site, side: int) -> qn.Calibration:
    """Return bounds, or those of the activation where they hold nothing but 0."""
    if not site.operands[side].size:
        return bounds

    # In shard_map devices share a range that is an argument, and each has its own activation:
    # branches must return what varies over the same devices.
    arrays = site.operands[side], *jax.tree.leaves(bounds)
    axes = frozenset[str]().union(*map(varying_axes, arrays))

    def own() -> qn.Calibration:
        found = extremes(site, side, activation_of(site, side), ())
        return jax.tree.map(
            lambda one, like: varying_over(one.astype(like.dtype).reshape(like.shape), axes),
            found,
            bounds,
        )

    def given() -> qn.Calibration:
        return jax.tree.map(lambda bound: varying_over(bound, axes), bounds)

    return lax.cond(is_unseen(bounds).all(), own, given)


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


def key_at(statistics: Statistics | None, site: Site, side: int) -> str:
    """Return an operand's statistics key; raise if it has none."""
    key = key_of(site.key(side), transforming(site, side) is not None)
    return _checked(statistics, site, key, SIDES[side])


def gradient_key_at(statistics: Statistics | None, site: Site) -> str:
    """Return the statistics key of an incoming gradient; raise if it has none."""
    return _checked(statistics, site, gradient_key(site), "gradient")


def _checked(statistics: Statistics | None, site: Site, key: str, what: str) -> str:
    if statistics is None:
        raise JaxtapError(
            f"The rule of {site.call.op_id} has static scales, and there are no statistics to take "
            f"the range of its {what} from. Measure them with plan.calibrate(params, batches), "
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
