"""Statistics: the ranges of a model's tensors, seen in training or calibration."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import quant_numerics as qn
from hijax_trace import Box

from ._errors import ManifestError
from ._manifest import Manifest
from ._plan import Plan, Site
from ._ranges import calibration_of


@dataclass(frozen=True)
class SiteStatistics:
    """The statistics of one site, as they were when they were asked for.

    Attributes:
        row: weighted sums of the bounds and how many were added: float32[3].
        average: how they are averaged.
        symmetric: whether the range is ``[-upper, upper]``.
    """

    row: jax.Array
    average: qn.MovingAverage
    symmetric: bool

    @property
    def count(self) -> jax.Array:
        """How many ranges were added, int32."""
        return self.row[2].astype(jnp.int32)

    def calibration(self) -> qn.Calibration:
        """The average: bounds of shape (), float32; zeros where nothing was added."""
        return calibration_of(self.row, self.average.decay, self.symmetric)


class QuantStats(Mapping[str, SiteStatistics]):
    """The statistics of a model's tensors, by site, with the manifest of the sites.

    A pytree of one ``hijax_trace.Box``: what runs under ``jit``, ``grad``, ``scan`` or ``remat``
    changes it in place. ``state`` is the same as a plain array, float32[sites, 3].

    Args:
        sites: the keys of the sites, and which of them are symmetric.
        average: how ranges are averaged.
        manifest: what the sites are.
        state: the sums and counts; None for statistics of nothing.
    """

    def __init__(
        self,
        sites: Mapping[str, bool],
        average: qn.MovingAverage,
        manifest: Manifest,
        state: jax.Array | None = None,
    ):
        self._symmetric = dict(sites)
        self._rows = {key: row for row, key in enumerate(self._symmetric)}
        self.average = average
        self.manifest = manifest
        self.box = Box(jnp.zeros((len(self._rows), 3), jnp.float32) if state is None else state)

    @classmethod
    def empty(cls, plan: Plan, average: qn.MovingAverage) -> QuantStats:
        """Returns statistics of nothing for a plan's sites without a fixed range."""
        sites = {key: _symmetric(site) for key, site in plan.sites.items() if site.fixed is None}
        return cls(sites, average, Manifest.of(plan))

    def __getitem__(self, key: str) -> SiteStatistics:
        return SiteStatistics(self.state[self._rows[key]], self.average, self._symmetric[key])

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows)

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, key: str) -> int:
        """Returns the row of a site in the state. Raises KeyError."""
        return self._rows[key]

    def is_symmetric(self, key: str) -> bool:
        """Returns whether the range of a site is symmetric. Raises KeyError."""
        return self._symmetric[key]

    @property
    def state(self) -> jax.Array:
        """Sums of lower and upper bounds, and counts: float32[sites, 3], in the sites' order."""
        return self.box.get()

    def with_state(self, state: jax.Array) -> QuantStats:
        """Returns statistics of the same sites, with other sums and counts, in a Box of their own.

        Raises:
            ManifestError: the state is of another number of sites.
        """
        if jnp.shape(state) != (len(self), 3):
            raise ManifestError(
                f"The state of {len(self)} sites has the shape {(len(self), 3)}, got "
                f"{jnp.shape(state)}. It is that of another model, or of other rules."
            )
        return QuantStats(self._symmetric, self.average, self.manifest, jnp.asarray(state))

    def to_json(self) -> str:
        """Returns the statistics and the manifest as JSON text."""
        rows = jax.device_get(self.state).tolist()
        sites = {
            key: {
                "lower": lower,
                "upper": upper,
                "count": int(count),
                "symmetric": self._symmetric[key],
            }
            for key, (lower, upper, count) in zip(self, rows, strict=True)
        }
        found = {"manifest": self.manifest.as_json(), "decay": self.average.decay, "sites": sites}
        return json.dumps(found, indent=1)

    @classmethod
    def from_json(cls, text: str) -> QuantStats:
        """Returns what ``to_json`` wrote.

        Raises:
            ManifestError: it is no such text.
        """
        try:
            found = json.loads(text)
            sites: Mapping[str, Mapping[str, Any]] = found["sites"]
            manifest = Manifest.from_json(found["manifest"])
            rows = [_row(site) for site in sites.values()]
            if set(sites) != {key for key, _ in manifest.entries}:
                raise ValueError("the manifest has other sites than the statistics")
            return cls(
                {key: bool(site["symmetric"]) for key, site in sites.items()},
                qn.MovingAverage(found["decay"]),
                manifest,
                jnp.asarray(rows, jnp.float32).reshape(-1, 3),
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ManifestError(
                f"These are no statistics as QuantStats.to_json writes them: {error!r}."
            ) from error

    def save(self, path: Any) -> None:
        """Writes them to a file, all or nothing."""
        from ._litert import save

        save(path, self.to_json().encode())

    @classmethod
    def load(cls, path: Any) -> QuantStats:
        """Reads what ``save`` wrote. Raises ManifestError as ``from_json``."""
        return cls.from_json(Path(path).read_bytes().decode(errors="replace"))

    def __repr__(self) -> str:
        return f"QuantStats({len(self)} sites)"


def _row(site: Mapping[str, Any]) -> list[float]:
    """Returns a row of the state. Raises ValueError where it can be none."""
    row = [float(site["lower"]), float(site["upper"]), float(site["count"])]
    if not all(map(math.isfinite, row)) or row[2] < 0 or row[2] != int(row[2]):
        raise ValueError(f"sums are finite, and counts whole numbers from 0 on; got {dict(site)}")
    return row


def _symmetric(site: Site) -> bool:
    return site.is_symmetric or qn.parse_calibration_method(site.method).is_symmetric


def _flatten(stats: QuantStats) -> tuple[Sequence[Any], Any]:
    return (stats.box,), (tuple(stats._symmetric.items()), stats.average, stats.manifest)


def _flatten_with_keys(stats: QuantStats) -> tuple[Any, Any]:
    (box,), aux = _flatten(stats)
    return ((jax.tree_util.GetAttrKey("state"), box),), aux


def _unflatten(aux: Any, parts: Any) -> QuantStats:
    stats = object.__new__(QuantStats)
    symmetric, stats.average, stats.manifest = aux
    stats._symmetric = dict(symmetric)
    stats._rows = {key: row for row, key in enumerate(stats._symmetric)}
    (stats.box,) = parts
    return stats


jax.tree_util.register_pytree_with_keys(QuantStats, _flatten_with_keys, _unflatten, _flatten)
