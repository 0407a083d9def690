"""QtProvider: quantized training and quantization-aware training.

Weights that a program gathers from devices are quantized before: fewer bytes than of floats.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

import quant_numerics as qn
from hijax_trace import Ungathered, repeated, ungathered
from interception_core import JaxtapError, hides_frames

from ..program.sites import Site, Sites
from ..rules.qt_rule import QtRule
from ..rules.rule import QuantizationRule
from ..run.contraction import quantized_contraction, trained_contraction
from ..run.static.observation import Observation
from ..run.static.ranges import has_gradient_range, has_range, trained_hows
from ..run.static.statistics import Statistics, calibrations, gradient_range, read
from .provider import XlaProvider


class QtProvider(XlaProvider):
    """Train with quantized contractions, forward and (``bwd_qtype``) backward.

    The forward pass has the values that PtqProvider's has. Without ``bwd_qtype`` gradients are
    those of the float operation (straight through; quantization-aware training). With it, the
    incoming gradient is quantized for each of the two contractions of the backward pass, and
    multiplied with the quantized values of the forward pass (quantized training). Arguments: see
    ``XlaProvider``; rules are ``QtRule`` or ``QuantizationRule``.
    """

    keeps_floats = True

    def apply(
        self,
        fn: Callable[..., Any],
        statistics: Statistics | None = None,
        *,
        update: bool = True,
    ) -> Callable[..., Any]:
        """Return ``fn`` with its operations quantized by the rules, to be differentiated.

        Args:
            fn: the function: a model, or a whole loss.
            statistics: of what has static scales: what ``init_statistics`` returns.
            update: whether running it adds to the statistics, as in training. JAX has no
                derivative of a ``lax.cond`` that does: measure first, then train without.

        Returns:
            A function of the same arguments and ``quant_key``, a random key that rules with
            ``bwd_stochastic_rounding`` need: pass a new one at each step.
        """

        @hides_frames
        @functools.wraps(fn)
        def call(*args: Any, quant_key: jax.Array | None = None, **kwargs: Any) -> Any:
            if quant_key is None and statistics is None:
                return plain(*args, **kwargs)
            observation = Observation(statistics) if update and statistics is not None else None
            ranges = None if observation or statistics is None else read(statistics)
            run = functools.partial(
                self._run, statistics=ranges, observation=observation, key=quant_key
            )
            sites = Sites(self._engine, self._rules, run, refuse=self._refuse)
            with observation.running() if observation else contextlib.nullcontext():
                result = sites.tap(fn)(*args, **kwargs)
            if observation is not None:
                observation.finish()
            return result

        plain = self._tapping.tap(fn)
        return call

    def apply_measured(self, fn: Callable[..., Any], statistics: Any) -> Callable[..., Any]:
        """Return ``apply(fn, statistics)``, which adds to statistics, but not to ranges."""
        update = any(isinstance(one, qn.Statistics) for one in statistics.values())
        return self.apply(fn, statistics, update=update)

    @property
    def call_options(self) -> tuple[str, ...]:
        """``quant_key``, the random key of stochastic rounding."""
        return ("quant_key",)

    def init_statistics(
        self, fn: Callable[..., Any], params: Any, *args: Any, **kwargs: Any
    ) -> Statistics:
        """Return empty statistics for all in ``fn`` that has static scales.

        Arguments as for ``plan``. The result is a pytree of Boxes: save it with the parameters.
        """
        return self.plan(fn, params, *args, **kwargs).empty_statistics()

    def _init_rule(self, rule: QuantizationRule) -> QuantizationRule:
        return QtRule.of(rule)

    def _sites(self) -> Sites:
        return Sites(self._engine, self._rules, self._run, refuse=self._refuse, is_pure=True)

    def _run(
        self,
        site: Site,
        statistics: Statistics | None = None,
        observation: Observation | None = None,
        key: jax.Array | None = None,
    ) -> Any:
        rule, hows = site.rule, trained_hows(site)
        assert isinstance(rule, QtRule)
        backward = tuple(rule.backward(weight is not None) for weight in site.weights)
        before = [
            None if site.is_linear else before_gather(site, i, how, backward, has_range(site, i))
            for i, how in enumerate(hows)
        ]
        measured = ungathered_site(site, before) if any(before) else site
        if observation is None:
            ranges = calibrations(statistics, measured, trains=True)
        else:
            observation.observe(measured)
            ranges = observation.calibrations(measured)
        if site.is_linear:
            # The derivatives are the float operation's, which JAX can transpose.
            static = site.contraction, site.hows
            return repeated(quantized_contraction, static, *site.operands, site.extras, ranges)
        noise = None
        if any(one is not None and one.stochastic_rounding is not None for one in backward):
            if key is None:
                raise JaxtapError(
                    f"quant_key must be a random key, since the rule of {site.call.op_id} rounds "
                    "gradients stochastically, got None. Pass one, new at each step: "
                    "provider.apply(fn)(params, ..., quant_key=key)."
                )
            noise = jax.random.fold_in(key, zlib.crc32(site.call.op_id.encode()))
        static = site.contraction, hows, None if backward == (None, None) else backward
        quantized = tuple(
            None if how is None or one is None else gathered(site, i, how, one, ranges[i])
            for i, (how, one) in enumerate(zip(hows, before, strict=True))
        )
        if not has_gradient_range(site):
            arrays = *site.operands, site.extras, ranges, None, noise, quantized
            return repeated(trained_contraction, static, *arrays)
        gradient = (
            gradient_range(statistics, site) if observation is None else observation.gradient(site)
        )
        arrays = *site.operands, site.extras, ranges, gradient, noise, quantized
        result = repeated(trained_contraction, static, *arrays)
        return result if observation is None else observation.watched(site, result)


_OF_PARTS = ("absmax", "minmax")
"""Calibration methods whose range is the extreme of the ranges of parts."""


def before_gather(
    site: Site,
    side: int,
    how: qn.HowToQuantize | None,
    backward: Sequence[qn.Backward | None],
    is_static: bool,
) -> Ungathered | None:
    """Return a weight as it was before the program gathered it, if that can be quantized instead.

    Then the program needs no float of it: the backward pass multiplies with its quantized values,
    and no gradient is cut off by a range.

    Args:
        site: the operation.
        side: which operand, 0 or 1.
        how: how it is quantized.
        backward: how the gradient of each operand is quantized.
        is_static: whether its range is given.
    """
    # An activation may be partial sums of devices, which its constraint adds up.
    other = backward[1 - side]
    if how is None or site.weights[side] is None or other is None or other.residual is not None:
        return None
    clips = is_static or qn.parse_calibration_method(how.method).clips
    if not site.contraction.trains or (how.masks and clips):
        return None
    found = ungathered(site.operands[side])
    if found is None or found.axis is None:
        return found
    fits = not is_static and _finds_its_scales(site, side, how, found)
    return found if fits else None


def _finds_its_scales(site: Site, side: int, how: qn.HowToQuantize, found: Ungathered) -> bool:
    """Return whether a device in ``shard_map`` finds the whole weight's scales for its part."""
    axis, part = found.axis, found.value
    if qn.get_qtype(how.qtype).two_level:  # one scale for the whole weight
        return False
    channels, tiles = site.contraction.granularity(side, site.operands[side].shape, how)
    if axis in tiles:  # a part must be whole tiles
        size = tiles[axis]
        return size == int(size) and part.shape[axis] % int(size) == 0
    return axis in channels or qn.parse_calibration_method(how.method).name in _OF_PARTS


def gathered(
    site: Site, side: int, how: qn.HowToQuantize, found: Ungathered, range_: Any
) -> qn.QArray:
    """Return a weight that is quantized and then gathered as the program gathers it.

    Its values are those of the weight that is gathered and then quantized.

    Args:
        site: the operation.
        side: which operand it is.
        how: how it is quantized.
        found: what ``before_gather`` returned.
        range_: its static range, or None.
    """
    part: jax.Array = lax.stop_gradient(found.value)
    if range_ is not None:
        scales = qn.scale_of(range_, how.qtype, how.scale_dtype)
        # A range that was not measured here would hide that training has diverged.
        q = qn.quantize_with(qn.without_infinities(part), how.qtype, *scales)
        return found.gathered(q, is_shared=True)  # type: ignore[return-value]
    if found.axis is None:  # one program for all devices: XLA finds the ranges of the whole weight
        return found.gathered(site.contraction.quantize(side, part, how))  # type: ignore[return-value]
    channels, tiles = site.contraction.granularity(side, site.operands[side].shape, how)
    cut = {"channel_axes": channels, "tile_axes": tiles}
    if found.axis in channels or found.axis in tiles:  # each slice is on one device
        q = qn.quantize(part, how.qtype, **cut, method=how.method, scale_dtype=how.scale_dtype)
        return found.gathered(q, is_shared=False)  # type: ignore[return-value]
    lower, upper = qn.calibrate(part, how.qtype, **cut, method=how.method)
    lower = None if lower is None else lax.pmin(lower, found.axis_name)
    found_range = qn.Calibration(lower, lax.pmax(upper, found.axis_name))
    scales = qn.scale_of(found_range, how.qtype, how.scale_dtype)
    q = qn.quantize_with(part, how.qtype, *scales, tile_axes=tiles)
    return found.gathered(q, is_shared=True)  # type: ignore[return-value]


def ungathered_site(site: Site, before: Sequence[Ungathered | None]) -> Site:
    """Return a site with its weights as they were before they were gathered, to measure them."""
    pairs = zip(site.operands, before, strict=True)
    left, right = (x if one is None else one.value for x, one in pairs)
    return dataclasses.replace(site, operands=(left, right))
