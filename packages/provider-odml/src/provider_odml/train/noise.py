"""What rounding a tensor to its range costs: noise, row by row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from interception_core import OpCall

from ..decide.decision import Site, SiteUse
from .qat import Training
from .ranges import at_site
from .statistics import QuantStats


@jax.jit
def noise_to_signal(exact: jax.Array, rounded: jax.Array) -> jax.Array:
    """Return the median over the rows of noise power over signal power, float32.

    A whole tensor has a good ratio where a few large values have nearly all of its power, as one
    element of one token in many transformers has. All other rows may be lost then.

    Args:
        exact: float array; its rows are its last axis. Rows of zeros don't count, nor does an
            array of nothing.
        rounded: the same, rounded.
    """
    if not exact.size:
        return jnp.float32(0)
    exact, rounded = (jnp.atleast_1d(x).astype(jnp.float32) for x in (exact, rounded))
    power = jnp.sum(exact**2, -1)
    ratio = jnp.sum((rounded - exact) ** 2, -1) / power
    found = jnp.nanmedian(jnp.where(power > 0, ratio, jnp.nan))
    return jnp.where(jnp.isnan(found), jnp.float32(0), found)


class Measuring(Training):
    """Runs the float program and measures what each range costs. Nothing is rounded.

    Args:
        stats: the ranges.
    """

    def __init__(self, stats: QuantStats):
        super().__init__(stats, update=False, calibrating=True)
        self._noise = None

    def begin(self) -> None:
        """Note what the statistics are."""
        super().begin()
        assert self._stats is not None
        assert self._before is not None
        nothing = jnp.zeros(len(self._before), jnp.float32)
        self._noise = self._stats.box.beside(nothing)

    def finish(self, out: Any) -> jax.Array:
        """Return the greatest ratio that was seen at each row of the statistics, float32."""
        del out
        assert self._noise is not None
        return self._noise.get()

    def activation(
        self, x: jax.Array, use: SiteUse, site: Site, where: str, call: OpCall
    ) -> jax.Array:
        """Measure a tensor, and return it as it is."""
        stats = self._stats
        assert stats is not None
        assert self._terms is not None
        assert self._noise is not None
        if use.device_only or site.fixed is not None:
            return x
        row = self._row(stats, site, call)
        if row is not None:
            how = self._how(site, stats)
            ratio = noise_to_signal(x, at_site(x, self._terms, row, how, False, True)[0])
            noise = self._noise.get()
            self._noise.set(noise.at[row].max(ratio))
        return x
