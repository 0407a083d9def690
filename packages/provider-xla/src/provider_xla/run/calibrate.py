"""Measure the static ranges of activations."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

import quant_numerics as qn
from interception_core.log import progress

from ..errors import QuantizationError, QuantizationWarning
from ..program.arrays import as_batch, by_path, is_stored, map_forms, of_arrays
from ..program.matching import follows_values
from ..program.sites import SIDES, Site
from .contraction import taking_stored
from .static.observation import Observation, is_of_jax
from .static.ranges import StaticRange
from .static.statistics import Statistics, key_of


def calibrate(
    plan: Any, fn: Callable[..., Any], params: Any, batches: Iterable[Sequence[Any]]
) -> Statistics:
    """Measure the static ranges of activations: see ``Plan.calibrate``."""
    if not plan.ranges:
        raise QuantizationError(
            "There is nothing to calibrate: no rule that decides an operation has "
            "act_static_scale=True."
        )
    empty = _empty(plan.ranges, plan, params)
    states = {key: jax.tree.map(np.asarray, one.state) for key, one in empty.items()}
    stored = follows_values(plan.engine)

    def measured(states: Any, *args: Any) -> Any:
        # Made here, statistics lie where the program does, on one device or on a mesh.
        statistics = _empty(plan.ranges, plan, params)
        for key, one in statistics.items():
            one.state = states[key]
        observation = Observation(statistics, trains=False, tells_cuts=True)

        def run(site: Site) -> Any:
            observation.observe(site)
            return NotImplemented

        tapped = plan.tap(run, fn, keyed=False)
        with observation.running():
            result = taking_stored(tapped, stored)(*args)
        observation.finish()
        seen = {key: one.state for key, one in statistics.items()}
        return result, (seen, observation.cuts())

    jitted, cuts = None, []
    at_end = jax.tree.structure((states, dict.fromkeys(states, 0)))
    for given in progress(batches, desc="calibrating", unit="batch"):
        batch = as_batch(given)
        call, arrays = of_arrays(measured, [states, *plan.arguments(params, batch)], {})
        jitted = jitted or jax.jit(call)
        with _explaining(empty):
            found = jitted(arrays)
        states, cut = jax.tree.unflatten(at_end, found[len(found) - at_end.num_leaves :])
        cuts.append([float(cut[key]) for key in empty])
    if jitted is None:
        raise QuantizationError("There is nothing to calibrate from: batches is empty.")
    _warn(states, np.mean(cuts, axis=0))
    return {key: one.average.get(states[key]) for key, one in empty.items()}


@contextlib.contextmanager
def _explaining(keys: Iterable[str]) -> Iterator[None]:
    """Explain what JAX says where it can't compile a program that writes ranges."""
    try:
        yield
    except (AssertionError, AttributeError, KeyError, ValueError) as error:
        is_effect = not isinstance(error, ValueError) or "Effect" in str(error)
        if not (is_effect and is_of_jax(error, __name__)):
            raise
        said = f"{type(error).__name__}: {error}".partition("\n")[0]
        raise QuantizationError(
            f"The ranges of {', '.join(keys)} can't be measured: JAX can't write them in some part "
            f"of the program, and says {said!r}. That may be a loop that "
            "ends at another step for each example of jax.vmap, or a solver such as cg. Take the "
            "loop out of jax.vmap (jax.lax.map), or give the operations there a rule with "
            "act_static_scale=False."
        ) from error


MOST_CUT = 0.1
"""``calibrate`` warns about ranges that cut off a larger share of an activation's magnitude."""


def _warn(states: Mapping[str, Any], cuts: np.ndarray) -> None:
    """Warn about activations that no batch reached, and about ranges that are too small."""
    missed = [key for key, one in states.items() if not int(one.count)]
    if missed:
        warnings.warn(
            f"No batch reached {', '.join(missed)}: there is no static range for what these "
            "operations read. Calibrate with batches that reach them; QuantizationRule."
            "unseen_range says what happens otherwise.",
            QuantizationWarning,
            stacklevel=4,
        )
    small = [f"{key} ({cut:.0%})" for key, cut in zip(states, cuts, strict=True) if cut > MOST_CUT]
    if small:
        warnings.warn(
            f"Static ranges cut off more than {MOST_CUT:.0%} of {', '.join(small)}: they are the "
            "mean over act_batch_axes of the largest magnitudes. If the first axis is not one of "
            "examples (nodes, positions, steps), give the rule act_batch_axes=(), or calibrate "
            "with more of the data.",
            QuantizationWarning,
            stacklevel=4,
        )


def empty_statistics(plan: Any, params: Any = None) -> dict[str, qn.Statistics]:
    """Return statistics of nothing: see ``Plan.empty_statistics``."""
    return _empty({**plan.ranges, **plan.trained_ranges}, plan, params)


def _empty(ranges: Mapping[str, StaticRange], plan: Any, params: Any) -> dict[str, qn.Statistics]:
    # Transformed activations have other ranges, and so other keys: see `key_of`.
    found, _ = by_path(params, plan.prefix, is_stored)
    transformed: set[str] = set()
    for path, leaf in found.items():

        def note(key: str | None, form: Any, path: str = path) -> Any:
            if form.changes_activation:
                weight = plan.weights[path] if key is None else plan.derived[key]
                transformed.update(f"{op_id}#{side}" for op_id in weight.ops for side in SIDES)
            return form

        map_forms(note, leaf)
    return {
        key_of(key, key in transformed): qn.Statistics(
            one.shape, one.average, symmetric=one.symmetric
        )
        for key, one in ranges.items()
    }
