"""Training: fake quantization with ranges that move along."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

import quant_numerics as qn
from interception_core import OpCall

from ._errors import OdmlError
from ._plan import ConstantUse, Decision, DynamicUse, Quantize, Site, SiteUse, WeightUse
from ._ranges import How, at_site, fake_quant_constant, fake_quant_dynamic, fake_quant_weight
from ._replay import Runtime, inverted
from ._statistics import QuantStats


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

    def forget(self) -> None:
        """Forgets the statistics: the model has been run."""
        self._stats = None

    def activation(self, x: jax.Array, use: SiteUse, site: Site, where: str) -> jax.Array:
        """Returns a tensor on the grid of its site."""
        if use.device_only:
            return x
        stats = self._stats
        if stats is None or site.fixed is not None:
            if self._calibrating:
                return x
            symmetric = qn.parse_calibration_method(site.method).is_symmetric
            nothing = jnp.zeros(3, jnp.float32)
            how = How.of(site, symmetric and site.fixed is None, None, (0,))
            return at_site(x, nothing, how, False, True)[0]
        row = self._row(stats, site)
        # Few batches are to say what is an outlier; many steps tell.
        batch = () if self._calibrating else (0,)
        how = How.of(site, stats.is_symmetric(site.key), stats.average.decay, batch)
        update = self._update and use.observe
        if self._calibrating and not update:
            return x
        state = stats.state
        out, new = at_site(x, state[row], how, update, not self._calibrating)
        if update:
            stats.box.set(jax.lax.dynamic_update_slice(state, new[None], (row, 0)))
        return out

    def parameter(self, x: jax.Array, use: Quantize, where: str) -> jax.Array:
        """Returns a parameter on its own grid."""
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
        """Runs an operation."""
        if inverted(decision):
            return args[0] * args[1]
        return call.proceed(*args, **kwargs)

    def _row(self, stats: QuantStats, site: Site) -> int:
        try:
            return stats.row(site.key)
        except KeyError:
            raise OdmlError(
                f"There are no statistics for {site.key}, only for {len(stats)} other "
                "sites: they were made for another program, or for other rules. Make them with "
                "init(params, ...) of this model."
            ) from None
