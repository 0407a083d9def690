"""Ranges: what has a static range, and what it is in one call."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.custom_batching import custom_vmap

import quant_numerics as qn
from interception_core import Step

from ...program.sites import Site
from ...rules.qt_rule import QtRule
from ...rules.rule import MOST_STEPS

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
    """Return whether an operand has a static range; in training parameters may, too."""
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
    return f"{site.call.op_id}{GRADIENT}"


GRADIENT = "#gradient"


def steps_of(site: Site) -> tuple[Step, ...]:
    """Return the loops around a site whose steps have a range each."""
    found = tuple(step for step in site.call.steps or () if step.length is not None)
    asked = site.rule.static_range
    if asked == "joined" or (asked is None and _count(found) > MOST_STEPS):
        return ()
    return found


def _count(steps: Sequence[Step]) -> int:
    return math.prod(step.length or 1 for step in steps)


def is_in_loop(site: Site) -> bool:
    """Return whether a loop around a site has a length that only a run can tell."""
    return any(step.length is None for step in site.call.steps or ())


def measure(site: Site, side: int) -> qn.Calibration:
    """Return an operand's range, float32 of shape (1, ..., 1).

    Each bound is the extreme over all axes but the rule's batch axes, and the mean over those and
    over the examples that the program maps by ``vmap``. It is the extreme over all if there are no
    batch axes, for delayed scaling, of a parameter, and if each example is one number: the mean of
    numbers does not hold them.
    """
    x, axes = activation_of(site, side), _examples(site, side)
    has_one = math.prod(x.shape[axis] for axis in axes) == x.size
    found = extremes(site, side, x, () if has_one else axes)
    if has_one or isinstance(_average(site), qn.AmaxHistory) or not site.rule.act_batch_axes:
        lower = None if found.lower is None else -max_of_all(-found.lower)
        return qn.Calibration(lower, max_of_all(found.upper))
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
    return tuple(sorted(varying_axes(site.operands[side]) & varying_axes(site.operands[other])))


def transforming(site: Site, side: int) -> qn.StoredForm | None:
    """Return the stored weight that changes an activation before it is quantized, or None."""
    held = site.call.proxy(site.operands[1 - side])
    if not (qn.is_form(held) and held.changes_activation):
        return None
    x = site.operands[side]
    x_shape = None if site.call.proxy(x) is not None else x.shape
    return held if held.takes(site.contraction, 1 - side, x_shape) else None


def activation_of(site: Site, side: int) -> jax.Array:
    """Return what is quantized for an operand, without its derivative."""
    x, held = jax.lax.stop_gradient(site.operands[side]), transforming(site, side)
    return x if held is None else held.activation(site.contraction, 1 - side, x)


def _examples(site: Site, side: int) -> tuple[int, ...]:
    """Return the axes of an operand of which the mean of the ranges is taken."""
    ndim = site.operands[side].ndim
    if site.weights[side] is not None or isinstance(_average(site), qn.AmaxHistory):
        return ()
    batch = {a % ndim for a in site.rule.act_batch_axes if -ndim <= a < ndim}
    return tuple(sorted(batch - set(site.contraction.shared(side, ndim))))


def extremes(site: Site, side: int, x: jax.Array, axes: tuple[int, ...]) -> qn.Calibration:
    """Return the range of what is quantized for an operand, one for each index of ``axes``."""
    how = site.hows[side]
    assert how is not None
    return qn.calibrate(x, how.qtype, channel_axes=axes, method=how.method)


def cut_off(site: Site, side: int, bounds: qn.Calibration) -> jax.Array:
    """Return the share of an activation's magnitude that bounds cut off, float32.

    A count of the numbers outside would say more of small activations: the mean of the largest
    magnitudes is below about half of these, by little.
    """
    x, how = activation_of(site, side), site.hows[side]
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


def max_of_all(x: jax.Array) -> jax.Array:
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
    return reduce(varying_over(x, axes), tuple(axes))


def varying_over(x: jax.Array, axes: Iterable[str]) -> jax.Array:
    """Return ``x`` as a value that devices along mesh axes may have others of."""
    missing = tuple(sorted(set(axes) - varying_axes(x)))
    return lax.pcast(x, missing, to="varying") if missing else x


def varying_axes(x: jax.Array) -> frozenset[str]:
    """Return the mesh axes along which devices may have different values, if JAX knows."""
    return frozenset(getattr(getattr(jax.typeof(x), "mat", None), "varying", ()))
