"""The grids of a program's tensors, from its statistics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

import quant_numerics as qn

from ..capture.graph import rolled, steps_in
from ..decide.plan import Plan
from ..errors import ManifestError
from ..train.manifest import Manifest
from ..train.statistics import QuantStats
from .composite import Grid, grid_of


def grids_of(plans: Sequence[Plan], stats: QuantStats | None) -> dict[str, Grid]:
    """Return the grid of every site.

    Raises:
        ManifestError: the statistics are not those of these programs.
    """
    sites = {key: site for plan in plans for key, site in plan.sites.items()}
    needed = {key: site for key, site in sites.items() if site.fixed is None}
    if stats is None:
        if needed:
            raise ManifestError(
                f"stats must have the ranges of {len(needed)} tensors, got None: "
                f"{', '.join(sorted(needed)[:5])}. Measure them with qat(fn, rules).calibrate"
                "(params, batches) or in training, and pass them."
            )
        stats = QuantStats({}, qn.MovingAverage(), Manifest((), jax.__version__))
    elif (difference := stats.manifest.diff(_manifest(plans))) is not None:
        raise ManifestError(
            f"stats must be those of this program (JAX {jax.__version__}), got others (made with "
            f"JAX {stats.manifest.jax_version}). Export the function that was trained, or "
            "calibrate this one. Below, - is in the statistics alone, + in the program alone, "
            "~ has changed.\n"
            f"{difference}"
        )
    unseen = sorted(key for key in needed if not int(stats[rolled(key)].count))
    if unseen:
        raise ManifestError(
            f"Statistics must have seen every site, got none of {', '.join(unseen)}. Run the model "
            "on data first: in training with quant_stats=, or with calibrate."
        )
    grids = {}
    for key, site in sites.items():
        if site.fixed is not None:
            lower, upper = map(jnp.float32, site.fixed)
            bounds = qn.Calibration(None if site.is_symmetric else lower, upper)
            grids[key] = grid_of(site, bounds)
        else:
            own = stats[rolled(key)].at(steps_in(key))
            grids[key] = grid_of(site, jax.device_get(own.calibration()))
    return grids


def _manifest(plans: Sequence[Plan]) -> Manifest:
    entries: dict[str, Any] = {}
    for plan in plans:
        for key, entry in Manifest.of(plan).entries:
            entries.setdefault(rolled(key), entry)
    return Manifest(tuple(entries.items()), jax.__version__)
