"""Measure the static ranges of activations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import jax

import quant_numerics as qn
from hijax_trace import Carrier

from ..errors import QuantizationError
from ..plan.plan import PlanData
from ..program.arrays import of_arrays
from ..program.matching import follows_values
from ..program.sites import Site, Sites, ignore
from ..run.infer import taking_stored
from ..run.static import Observation, Statistics, key_of
from ..run.stored import is_stored
from ..run.transformed import TransformedWeight


def calibrate(
    plan: PlanData, fn: Callable[..., Any], params: Any, batches: Iterable[Sequence[Any]]
) -> Statistics:
    """Measure the static ranges of activations: see ``Plan.calibrate``."""
    from tqdm import tqdm

    if not plan.ranges:
        raise QuantizationError(
            "There is nothing to calibrate: no rule that decides an operation has "
            "act_static_scale=True."
        )
    statistics = empty_statistics(plan, params)
    stored = follows_values(plan.engine)

    def measured(*args: Any) -> Any:
        observation = Observation(statistics)

        def run(site: Site) -> Any:
            observation.observe(site)
            return NotImplemented

        sites = Sites(plan.rules, run, ignore, keyed=False)
        result = taking_stored(plan.engine.wrap(fn, sites.interceptor), stored)(*args)
        observation.finish()
        return result

    jitted = None
    for batch in tqdm(batches, desc="calibrating", unit="batch", disable=None):
        args = list(batch)
        args.insert(plan.argnum, params)
        call, arrays = of_arrays(measured, args, {})
        jitted = jitted or jax.jit(call)
        jax.block_until_ready(jitted(arrays))
    if jitted is None:
        raise QuantizationError("There is nothing to calibrate from: batches is empty.")
    return {key: one.calibration() for key, one in statistics.items()}


def empty_statistics(plan: PlanData, params: Any = None) -> dict[str, qn.Statistics]:
    """Return statistics of nothing: see ``Plan.empty_statistics``."""
    # Transformed activations have other ranges, and so other keys: see `key_of`.
    found, _ = jax.tree_util.tree_flatten_with_path(params, is_leaf=is_stored)
    ops: set[str] = set()
    for path, leaf in found:
        held = {plan.prefix + jax.tree_util.keystr(path): leaf}
        if isinstance(leaf, Carrier):
            held = dict.fromkeys(held, leaf.own)
            held |= {plan.derived[key].path: one for key, one in leaf.derived.items()}
        for name, one in held.items():
            if isinstance(one, TransformedWeight):
                ops.update(plan.weights[name].ops)
    return {
        key_of(key, key.rpartition("#")[0] in ops): qn.Statistics(
            one.shape, symmetric=one.symmetric
        )
        for key, one in plan.ranges.items()
    }
