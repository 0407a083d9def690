"""Training: fake quantization with ranges that move along."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn
from interception_core import OpCall

from ..decide.decision import ConstantUse, Decision, DynamicUse, Quantize, Site, SiteUse, WeightUse
from ..errors import OdmlError
from .averages import added, joined_row, terms_of
from .parameters import fake_quant_constant, fake_quant_dynamic, fake_quant_weight
from .ranges import How, at_site, fused_op
from .replay import Runtime, inverted
from .seen import Seen
from .statistics import QuantStats

_NOTHING = np.repeat(np.array([[0], [1], [0], [1], [0]], np.float32), 2, 1)[None]
"""The terms of a site that has seen nothing."""


class Training(Runtime):
    """Quantizes with the average of the ranges so far.

    Args:
        stats: the statistics; None for the range of each tensor itself.
        update: whether ranges are added to them.
        calibrating: whether ranges are added alone, and nothing is rounded.
    """

    def __init__(self, stats: QuantStats | None, update: bool = True, calibrating: bool = False):
        self._stats = stats
        self._update = update
        self._calibrating = calibrating
        self._before: jax.Array | None = None
        self._terms: jax.Array | None = None
        self._seen: Seen | None = None
        self._rows: Mapping[str, Any] = {}

    def begin(self) -> None:
        """Note what the statistics are before a call of the program."""
        stats = self._stats
        if stats is None:
            return
        self._before = stats.state
        self._terms = terms_of(self._before, stats.average)
        self._rows = _numbers(stats, self._before)
        if self._update:
            self._seen = Seen(stats, len(self._before))

    def finish(self, out: Any) -> Any:
        """Add what the call has seen to the statistics, all sites at once. Return its result."""
        stats, seen = self._stats, self._seen
        if stats is not None and seen is not None:
            assert self._before is not None
            stats.box.set(added(self._before, seen.get(), stats.average))
        return out

    def forget(self) -> None:
        """Forget the statistics: the model has been run."""
        self._stats = self._before = self._terms = self._seen = None
        self._rows = {}

    def activation(
        self, x: jax.Array, use: SiteUse, site: Site, where: str, call: OpCall
    ) -> jax.Array:
        """Return a tensor on the grid of its site."""
        if use.device_only or not x.size:
            return x  # of an empty batch: there is nothing to see
        stats = self._stats
        if stats is None or site.fixed is not None:
            if self._calibrating:
                return x
            symmetric = qn.parse_calibration_method(site.method).is_symmetric
            how = How.of(site, symmetric and site.fixed is None, None, (0,))
            return at_site(x, _NOTHING, 0, how, False, True)[0]
        row = self._row(stats, site, call)
        how = self._how(site, stats)
        observe = self._update and use.observe and row is not None
        if self._calibrating and not observe:
            return x
        assert self._before is not None
        assert self._terms is not None
        quantize = not self._calibrating
        if row is None:
            rows = self._before[stats.rows(site.key)]
            terms = terms_of(joined_row(rows, stats.average)[None], stats.average)
            return at_site(x, terms, 0, how, False, quantize)[0]
        # A row that is observed is overwritten, unless its bounds are joined.
        seen = None if self._seen is None else self._seen.get(site.is_joined or not observe)
        out, seen = at_site(x, self._terms, row, how, observe, quantize, seen, site.is_joined)
        if observe:
            assert self._seen is not None
            self._seen.set(seen)
        return out

    def parameter(self, x: jax.Array, use: Quantize, where: str) -> jax.Array:
        """Return a parameter on its own grid."""
        if self._calibrating:
            return x if not (isinstance(use, ConstantUse) and use.inverted) else 1 / x
        match use:
            case WeightUse():
                return fake_quant_weight(x, use)
            case ConstantUse():
                return fake_quant_constant(1 / x if use.inverted else x, use)
            case DynamicUse():
                return fake_quant_dynamic(x, use)
        raise AssertionError(use)

    def run(self, decision: Decision, call: OpCall, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Run an operation."""
        if inverted(decision):
            return args[0] * args[1]
        return call.proceed(*args, **kwargs)

    def _how(self, site: Site, stats: QuantStats) -> How:
        # Few batches are to say what is an outlier; many steps tell.
        batch = () if self._calibrating else (0,)
        return How.of(site, stats.is_symmetric(site.key), stats.average.decay, batch)

    def _row(self, stats: QuantStats, site: Site, call: OpCall) -> Any:
        """Return the row of a site's step; None for unknown steps."""
        try:
            row, steps = self._rows[site.key], stats.steps(site.key)
        except KeyError:
            raise OdmlError(
                f"quant_stats must be those of this program and its rules, got those of "
                f"{len(stats)} sites without {site.key}. Make them with init(params, ...) of this "
                "model."
            ) from None
        if not steps:
            return row
        around = call.steps or ()
        if steps != site.steps or any(step.index is None for step in around[: len(steps)]):
            return None
        inner = np.int32(0)
        for step, length in zip(around, steps, strict=False):
            inner = inner * np.int32(length) + step.index
        return inner + row


def _numbers(stats: QuantStats, state: jax.Array) -> dict[str, Any]:
    """Return the first row of each site in the state, int32.

    XLA on CPU compiles equal kernels once, however often they are in a program. Those of a site
    read and write its row, and are those of other sites too if the number of the row is an
    operand. So it must be one that XLA does not know: counted on from the row before.
    """
    if fused_op() is not None or not isinstance(state, jax.core.Tracer) or not len(stats):
        return {key: np.int32(stats.row(key)) for key in stats}
    # Of floats, x * 0 is not known to be 0; integer divisions are not computed twice.
    zeros = (lax.stop_gradient(state)[0] * np.float32(0)).astype(jnp.int32)
    one = lax.div(zeros[0] + np.int32(1), zeros[1] + np.int32(1))
    row, found = one - np.int32(1), {}
    for key in stats:
        found[key] = row = lax.div(row, one)
        row = row + np.int32(math.prod(stats.steps(key)))
    return found
