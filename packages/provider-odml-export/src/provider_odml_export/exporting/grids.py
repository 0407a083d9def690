"""The grids of a program's tensors, from its statistics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

import quant_numerics as qn
from provider_odml import ManifestError, Plan, QuantStats
from provider_odml.features import Manifest, SiteUse

from .composite import Grid, grid_of


def checked(plans: Sequence[Plan], stats: QuantStats | None) -> QuantStats:
    """Return the statistics of programs.

    Args:
        plans: of the programs as they were trained.
        stats: the statistics; None if no tensor needs them.

    Raises:
        ManifestError: they are not those of these programs.
    """
    if stats is None:
        needed = [key for plan in plans for key, site in plan.sites.items() if site.fixed is None]
        if needed:
            needed = sorted(set(needed))
            raise ManifestError(
                f"stats must have the ranges of {len(needed)} tensors, got None: "
                f"{', '.join(needed[:5])}. Measure them with qat(fn, rules).calibrate"
                "(params, batches) or in training, and pass them."
            )
        return QuantStats({}, qn.MovingAverage(), Manifest((), jax.__version__))
    if (difference := stats.manifest.diff(_manifest(plans))) is not None:
        raise ManifestError(
            f"stats must be those of this program (JAX {jax.__version__}), got others (made with "
            f"JAX {stats.manifest.jax_version}). Export the function that was trained, or "
            "calibrate this one. Below, - is in the statistics alone, + in the program alone, "
            "~ has changed.\n"
            f"{difference}"
        )
    return stats


def grids_of(
    plan: Plan, stats: QuantStats, origins: Mapping[str, tuple[str, tuple[int, ...]]]
) -> dict[str, Grid]:
    """Return the grid of every site.

    Args:
        plan: of the program that is exported.
        stats: those of the program as it was trained.
        origins: see ``WrittenOut``.

    Raises:
        ManifestError: the statistics have not seen a site.
    """
    # A tensor without elements is never seen: any range will do.
    needed = [key for key, site in plan.sites.items() if site.fixed is None and 0 not in site.shape]
    unseen = [key for key in needed if not int(stats[origins[key][0]].count)]
    if unseen:
        names = sorted({origins[key][0] for key in unseen})
        raise ManifestError(
            f"Statistics must have seen every site, got none of {', '.join(names)}. Run the model "
            "on data first: in training with quant_stats=, or with calibrate."
            f"{_not_taken(plan, unseen)}"
        )
    ranges = {}
    for key, site in plan.sites.items():
        if site.fixed is not None or 0 in site.shape:
            lower, upper = map(jnp.float32, site.fixed or (0.0, 1.0))
            ranges[key] = qn.Calibration(None if site.is_symmetric else lower, upper)
        else:
            name, step = origins[key]
            ranges[key] = jax.device_get(stats[name].at(step).calibration())
    for keys in _computed_once(plan):
        ranges |= dict.fromkeys(keys, _joined([ranges[key] for key in keys]))
    return {key: grid_of(site, ranges[key]) for key, site in plan.sites.items()}


def _computed_once(plan: Plan) -> list[list[str]]:
    """Return sites of equal tensors in branches, such as two that begin with one product.

    The converter computes equal operations once. What has two scales then is integer on one side
    and float on the other, and LiteRT's kernels refuse it. Elsewhere equal tensors have equal
    ranges: each was seen as often as the others.
    """
    first: dict[Any, str] = {}
    same: dict[str, str] = {}  # by operation, the first that computes the same
    sites: dict[tuple[str, str], list[str]] = {}
    for op_id, decision in plan.decisions.items():
        node, output = decision.node, decision.output
        if not node.is_chosen:
            continue
        uses = [replace(use, tensor=same.get(use.tensor or "", use.tensor)) for use in node.uses]
        is_known = all(use.tensor or use.path or use.scalar is not None for use in uses)
        # As text, since parameters hold lists. They do not say all, such as strides: two operations
        # that are taken for one share a range that holds both.
        key = (node.op, node.shape, *uses, repr(node.params)) if is_known else op_id
        same[op_id] = first.setdefault(key, op_id)
        if output is not None and not output.device_only and plan.sites[output.site].fixed is None:
            known = sites.setdefault((same[op_id], plan.sites[output.site].qtype), [])
            known.append(output.site)
    return [keys for keys in sites.values() if len(set(keys)) > 1]


def _joined(ranges: Sequence[qn.Calibration]) -> qn.Calibration:
    """Return a range that holds all of several."""
    upper = max(float(one.upper) for one in ranges)
    lowers = [float(one.lower) for one in ranges if one.lower is not None]
    lower = jnp.float32(min(lowers)) if len(lowers) == len(ranges) else None
    return qn.Calibration(lower, jnp.float32(upper))


def _not_taken(plan: Plan, unseen: Sequence[str]) -> str:
    """Return what to do about branches among the sites that no data reached."""
    nodes = [
        decision.node
        for decision in plan.decisions.values()
        for use in (*decision.inputs.values(), decision.output)
        if isinstance(use, SiteUse) and use.site in unseen and decision.node.is_chosen
    ]
    if not nodes:
        return ""
    return (
        f" No data took {', '.join(dict.fromkeys(node.op_id for node in nodes))}: "
        "the file holds all branches that an input chooses. Calibrate with data that takes each, "
        "or choose by a Python value, which leaves the others out."
    )


def _manifest(plans: Sequence[Plan]) -> Manifest:
    entries: dict[str, Any] = {}
    for plan in plans:
        for key, entry in Manifest.of(plan).entries:
            entries.setdefault(key, entry)
    return Manifest(tuple(entries.items()), jax.__version__)
