"""Statistics: the ranges of a model's tensors, seen in training or calibration."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import Box

from ..decide.decision import Site
from ..decide.plan import Plan
from ..errors import ManifestError, OdmlError
from .averages import joined_row, state_of
from .manifest import Manifest


class Kept(NamedTuple):
    """What is known of a site.

    Attributes:
        symmetric: whether its range is ``[-upper, upper]``.
        steps: how many steps the loops have whose steps have a range each.
    """

    symmetric: bool
    steps: tuple[int, ...] = ()

    @property
    def rows(self) -> int:
        """Return how many rows of the state it has."""
        return math.prod(self.steps)

    @classmethod
    def from_json(cls, site: Mapping[str, Any]) -> Kept:
        """Return what is known of a site that was written as JSON."""
        return cls(bool(site["symmetric"]), tuple(map(int, site["steps"])))


@dataclass(frozen=True)
class SiteStatistics:
    """The statistics of one site, a snapshot.

    Attributes:
        row: weighted sums of the bounds and how many were added: float32[3]; float32[steps, 3]
            where the steps of a loop have a range each.
        average: how they are averaged.
        symmetric: whether the range is ``[-upper, upper]``.
    """

    row: jax.Array
    average: qn.MovingAverage
    symmetric: bool

    @property
    def count(self) -> jax.Array:
        """The number of ranges added, int32; of several steps, the most."""
        return jnp.max(self.row[..., 2]).astype(jnp.int32)

    def calibration(self) -> qn.Calibration:
        """The average: bounds of shape (), or (steps,), float32; zeros where nothing was added."""
        found = self.average.get(state_of(self.row))
        return qn.Calibration(None, found.upper) if self.symmetric else found

    def at(self, index: Sequence[int]) -> SiteStatistics:
        """Return the statistics of a step, or else the joined ones.

        Args:
            index: the number of the step in each loop, the outermost first.
        """
        steps = self.row.shape[:-1]
        own = tuple(index[: len(steps)])
        known = len(own) == len(steps) and all(i < n for i, n in zip(own, steps, strict=True))
        if known and bool(self.row[own][2] > 0):
            return replace(self, row=self.row[own])
        return replace(self, row=joined_row(self.row, self.average))


class QuantStats(Mapping[str, SiteStatistics]):
    """The statistics of a model's tensors by site, with their manifest.

    A pytree of one ``hijax_trace.Box``: what runs under ``jit``, ``grad``, ``scan`` or ``remat``
    changes it in place. ``state`` is the same as a plain array, float32[rows, 3]: a row for each
    site, or for each of its steps.

    Args:
        sites: what is known of the sites, by key.
        average: how ranges are averaged.
        manifest: what the sites are.
        state: the sums and counts; None for statistics of nothing.
    """

    def __init__(
        self,
        sites: Mapping[str, Kept],
        average: qn.MovingAverage,
        manifest: Manifest,
        state: jax.Array | None = None,
    ):
        self._set_up(sites, average, manifest)
        state = jnp.zeros((self._count, 3), jnp.float32) if state is None else state
        self.box = Box(state, differentiated=False)

    def _set_up(
        self, sites: Mapping[str, Kept], average: qn.MovingAverage, manifest: Manifest
    ) -> None:
        self._sites = dict(sites)
        self.average = average
        self.manifest = manifest
        ends = list(itertools.accumulate(one.rows for one in self._sites.values()))
        self._first = dict(zip(self._sites, [0, *ends], strict=False))
        self._count = ends[-1] if ends else 0

    @classmethod
    def empty(cls, plan: Plan, average: qn.MovingAverage) -> QuantStats:
        """Return statistics of nothing for a plan's sites without a fixed range."""
        sites = {
            key: Kept(_symmetric(site), site.steps)
            for key, site in plan.sites.items()
            if site.fixed is None
        }
        return cls(sites, average, Manifest.of(plan))

    def __getitem__(self, key: str) -> SiteStatistics:
        kept = self._sites[key]
        row = self.state[self.rows(key)].reshape(*kept.steps, 3)
        return SiteStatistics(row, self.average, kept.symmetric)

    def __iter__(self) -> Iterator[str]:
        return iter(self._sites)

    def __len__(self) -> int:
        return len(self._sites)

    def row(self, key: str) -> int:
        """Return the row of a site in the state: the first of its steps. Raise KeyError."""
        return self._first[key]

    def rows(self, key: str) -> slice:
        """Return the rows of a site in the state. Raise KeyError."""
        first = self._first[key]
        return slice(first, first + self._sites[key].rows)

    def steps(self, key: str) -> tuple[int, ...]:
        """Return the lengths of the loops with a range per step."""
        return self._sites[key].steps

    def is_symmetric(self, key: str) -> bool:
        """Return whether the range of a site is symmetric. Raise KeyError."""
        return self._sites[key].symmetric

    @property
    def state(self) -> jax.Array:
        """Sum of lower and upper bounds, and counts: float32[rows, 3], in the sites' order."""
        return self.box.get()

    def with_state(self, state: jax.Array) -> QuantStats:
        """Return statistics of the same sites with another state.

        Raises:
            ManifestError: the state is of another number of sites.
        """
        if jnp.shape(state) != (self._count, 3):
            raise ManifestError(
                f"The state of {len(self)} sites must have the shape {(self._count, 3)}, got "
                f"{jnp.shape(state)}. It is that of another model, or of other rules."
            )
        return QuantStats(self._sites, self.average, self.manifest, jnp.asarray(state))

    def to_json(self) -> str:
        """Return the statistics and the manifest as JSON text."""
        state = np.asarray(jax.device_get(self.state))
        sites = {}
        for key, kept in self._sites.items():
            lower, upper, count = (
                column.reshape(kept.steps).tolist() for column in state[self.rows(key)].T
            )
            sites[key] = {"lower": lower, "upper": upper, "count": count} | kept._asdict()
        found = {"manifest": self.manifest.as_json(), "decay": self.average.decay, "sites": sites}
        return json.dumps(found, indent=1)

    @classmethod
    def from_json(cls, text: str) -> QuantStats:
        """Return what ``to_json`` wrote.

        Raises:
            ManifestError: the text is something else.
        """
        try:
            found = json.loads(text)
            sites: Mapping[str, Mapping[str, Any]] = found["sites"]
            manifest = Manifest.from_json(found["manifest"])
            kept = {key: Kept.from_json(site) for key, site in sites.items()}
            rows = [_rows(site, kept[key]) for key, site in sites.items()]
            if set(sites) != {key for key, _ in manifest.entries}:
                raise ValueError("the manifest must have the sites of the statistics, got others")
            return cls(
                kept,
                qn.MovingAverage(found["decay"]),
                manifest,
                jnp.concatenate([jnp.zeros((0, 3), jnp.float32), *rows]),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(
                f"The text must be what QuantStats.to_json writes, got another: {error!r}."
            ) from error

    def save(self, path: Any) -> None:
        """Write them to a file, all or nothing."""
        from ..files import save

        save(path, self.to_json().encode())

    @classmethod
    def load(cls, path: Any) -> QuantStats:
        """Read what ``save`` wrote. Raise ManifestError as ``from_json``."""
        return cls.from_json(Path(path).read_bytes().decode(errors="replace"))

    def __repr__(self) -> str:
        return f"QuantStats({len(self)} sites)"


def check_statistics(name: str, given: Any) -> None:
    """Check that an argument is None or holds statistics.

    Args:
        name: of the argument.
        given: what was given.

    Raises:
        OdmlError: it is something else.
    """
    if given is not None and not isinstance(given, QuantStats):
        raise OdmlError(
            f"{name} must be None or QuantStats, got a {type(given).__name__}. Pass what "
            "qat(fn, rules).calibrate(params, batches) or .init(params, x) returned."
        )


def _rows(site: Mapping[str, Any], kept: Kept) -> np.ndarray:
    """Return the rows of a site in the state. Raise ValueError where they can be none."""
    columns = [np.asarray(site[name], np.float32) for name in ("lower", "upper", "count")]
    rows, counts = np.stack(columns, -1), columns[-1]
    if rows.shape != (*kept.steps, 3) or not np.isfinite(rows).all():
        raise ValueError(
            f"sums must be finite, one for each of {kept.steps} steps, got {dict(site)}"
        )
    if (counts < 0).any() or (counts != np.trunc(counts)).any():
        raise ValueError(f"counts must be whole numbers from 0 on, got {dict(site)}")
    return rows.reshape(-1, 3)


def _symmetric(site: Site) -> bool:
    return site.is_symmetric or qn.parse_calibration_method(site.method).is_symmetric


def _flatten(stats: QuantStats) -> tuple[Sequence[Any], Any]:
    return (stats.box,), (tuple(stats._sites.items()), stats.average, stats.manifest)


def _flatten_with_keys(stats: QuantStats) -> tuple[Any, Any]:
    (box,), aux = _flatten(stats)
    return ((jax.tree_util.GetAttrKey("state"), box),), aux


def _unflatten(aux: Any, parts: Any) -> QuantStats:
    stats = object.__new__(QuantStats)
    sites, average, manifest = aux
    stats._set_up(dict(sites), average, manifest)
    (stats.box,) = parts
    return stats


jax.tree_util.register_pytree_with_keys(QuantStats, _flatten_with_keys, _unflatten, _flatten)
