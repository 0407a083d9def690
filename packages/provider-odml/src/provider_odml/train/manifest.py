"""The manifest: which sites statistics are about, to be compared at export."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

from ..decide.plan import Plan


@dataclass(frozen=True)
class Entry:
    """One site.

    Attributes:
        qtype: its qtype.
        shape: of its tensor, without the batch: a model may be exported for another one.
        fingerprint: of the operation that it is observed at.
    """

    qtype: str
    shape: tuple[int, ...]
    fingerprint: str


@dataclass(frozen=True)
class Manifest:
    """The sites of a program.

    Attributes:
        entries: by key, in the program's order.
        jax_version: that it was made with.
    """

    entries: tuple[tuple[str, Entry], ...]
    jax_version: str

    @classmethod
    def of(cls, plan: Plan) -> Manifest:
        """Return the manifest of a plan's sites: of those whose ranges are found in data."""
        entries = tuple(
            (key, Entry(site.qtype, site.shape, site.fingerprint))
            for key, site in plan.sites.items()
            if site.fixed is None
        )
        return cls(entries, jax.__version__)

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        sites = {
            key: {"qtype": e.qtype, "shape": list(e.shape), "fingerprint": e.fingerprint}
            for key, e in self.entries
        }
        return {"jax": self.jax_version, "sites": sites}

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Manifest:
        """Return what ``as_json`` returned."""
        entries = tuple(
            (key, Entry(e["qtype"], tuple(e["shape"]), e["fingerprint"]))
            for key, e in found["sites"].items()
        )
        return cls(entries, found["jax"])

    def diff(self, now: Manifest) -> str | None:
        """Return how a program's sites differ from these, or None.

        Lines begin with ``-`` for what the statistics alone have, with ``+`` for what the
        program alone has, with ``~`` for what has changed.
        """
        before, after = dict(self.entries), dict(now.entries)
        lines = []
        for key in [*before, *(key for key in after if key not in before)]:
            old, new = before.get(key), after.get(key)
            if old is None or new is None:
                found = old or new
                assert found is not None
                sign = "+" if old is None else "-"
                lines.append(f"{sign} {key}: {found.qtype}{list(found.shape)}")
            elif old.qtype != new.qtype or len(old.shape) != len(new.shape):
                lines.append(
                    f"~ {key}: {old.qtype}{list(old.shape)} -> {new.qtype}{list(new.shape)}"
                )
            elif old.fingerprint != new.fingerprint:
                lines.append(f"~ {key}: the operation of this number is another one now")
        return "\n".join(lines) or None
