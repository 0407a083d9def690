"""The registry: every declared name and its owner."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import pluggy

from ..errors import PluginError, nearest_name, one_line, unknown_name
from ..log import logger
from .loading import load, new_manager
from .records import PluginRecord
from .specs import Spec

DISABLE = "JAXTAP_DISABLE_PLUGINS"
STRICT = "JAXTAP_STRICT_PLUGINS"

_log = logger("plugins")

S = TypeVar("S", bound=Spec)


class Claim(NamedTuple, Generic[S]):
    """A spec and the plugin that declares it."""

    spec: S
    owner: PluginRecord

    @property
    def label(self) -> str:
        """The spec and its plugin, for messages."""
        return f"{self.spec.kind.capitalize()} {self.spec.key!r} of {self.owner.label}"


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Registry:
    """The installed plugins and their declarations. It never changes.

    Attributes:
        records: one per installed plugin, sorted by name.
        claims: the claims of each (kind, key), several if plugins conflict.
        warnings: one line per plugin that is left out or has a fault.
        strict: whether failures of plugins are raised.
        manager: pluggy's manager, with the plugins that did not fail.
    """

    records: tuple[PluginRecord, ...]
    claims: Mapping[tuple[str, str], tuple[Claim, ...]]
    warnings: tuple[str, ...]
    strict: bool
    manager: pluggy.PluginManager

    @property
    def broken(self) -> tuple[PluginRecord, ...]:
        """The records of the plugins that failed or that conflict."""
        return tuple(record for record in self.records if record.error is not None)

    @property
    def undeclared(self) -> tuple[PluginRecord, ...]:
        """The records of the plugins that failed before they could declare anything."""
        return tuple(record for record in self.broken if not record.specs)

    @property
    def left_out(self) -> str:
        """The plugins that may have an unknown name, for messages; empty if there are none."""
        hints = [f"Failed: {record.label}, {record.reason}" for record in self.undeclared]
        disabled = [record.name for record in self.records if record.status == "disabled"]
        if disabled:
            hints.append(f"Disabled by {DISABLE}: {', '.join(disabled)}.")
        return " ".join(hints)

    def of(self, wanted: type[S]) -> tuple[Claim[S], ...]:
        """Return the uncontested claims of a kind of spec, by key."""
        return tuple(
            Claim(claim.spec, claim.owner)
            for (claim, *rivals) in self.claims.values()
            if not rivals and isinstance(claim.spec, wanted)
        )

    def get(self, wanted: type[S], name: str) -> Claim[S]:
        """Return the claim of a name.

        Raises:
            PluginError: two plugins claim the name, or it is the name of a plugin that failed.
            UnknownNameError: nothing has that name. The message lists the plugins that failed,
                because one of them may provide it. The first one's error is the cause.
        """
        found = self.claims.get((wanted.kind, name), ())
        if len(found) > 1:
            raise conflict(found)
        available = {claim.spec.key: claim for claim in self.of(wanted)}
        if found:
            return available[name]
        for record in self.undeclared:
            if record.name == name:
                raise PluginError(
                    f"No {wanted.kind} {name!r}: {record.label} failed. {record.reason}"
                ) from record.error
        cause = self.undeclared[0].error if self.undeclared else None
        raise unknown_name(wanted.kind, name, available, self.left_out) from cause

    def raise_if_strict(self) -> None:
        """Raise for broken plugins, if failures are to be raised.

        Raises:
            PluginError: `JAXTAP_STRICT_PLUGINS` is set and a plugin is broken.
        """
        if self.strict and self.broken:
            reasons = " ".join(f"{record.label}, {record.reason}" for record in self.broken)
            raise PluginError(
                f"All plugins must load because {STRICT} is set. Broken: {reasons}"
            ) from self.broken[0].error


def build(installed: Iterable[PluginRecord], environ: Mapping[str, str]) -> Registry:
    """Load the plugins and collect their declarations.

    Returns:
        The registry. A plugin's faults are in its record, and in one line of warnings.
    """
    installed = tuple(installed)
    strict = environ.get(STRICT, "") not in ("", "0")
    disabled = {name.strip() for name in environ.get(DISABLE, "").split(",")} - {""}
    manager = new_manager()
    loaded = [
        _left_out(found, installed, disabled) or load(manager, found, strict) for found in installed
    ]
    claims = _claims(loaded)
    records = tuple(_with_conflicts(record, claims) for record in loaded)
    for record in records:
        _log.debug("%s: %s (%d declarations)", record.label, record.status, len(record.specs))
    warnings = (*_unknown_disabled(disabled, installed), *_warnings(records))
    return Registry(records, MappingProxyType(claims), warnings, strict, manager)


def _left_out(
    found: PluginRecord, installed: tuple[PluginRecord, ...], disabled: set[str]
) -> PluginRecord | None:
    """Return the record of a plugin that must not be loaded, or None."""
    if found.name in disabled:
        return replace(found, status="disabled", error=None)
    namesakes = [other.distribution for other in installed if other.name == found.name]
    if len(namesakes) == 1:
        return None
    error = PluginError(
        f"A plugin name must be claimed by one distribution, got {found.name!r} from the "
        f"distributions {' and '.join(namesakes)}; neither is loaded. Uninstall one of them."
    )
    return replace(found, status="conflict", error=error)


def _claims(records: Iterable[PluginRecord]) -> dict[tuple[str, str], tuple[Claim, ...]]:
    claims: dict[tuple[str, str], tuple[Claim, ...]] = {}
    for record in records:
        for spec in record.specs:
            key = (spec.kind, spec.key)
            claims[key] = (*claims.get(key, ()), Claim(spec, record))
    return dict(sorted(claims.items()))


def _with_conflicts(
    record: PluginRecord, claims: Mapping[tuple[str, str], tuple[Claim, ...]]
) -> PluginRecord:
    contested = [
        rivals
        for rivals in claims.values()
        if len(rivals) > 1 and any(claim.owner is record for claim in rivals)
    ]
    if not contested:
        return record
    error = PluginError(" ".join(str(conflict(rivals)) for rivals in contested))
    return replace(record, status="conflict", error=error)


def conflict(claims: tuple[Claim, ...]) -> PluginError:
    """Return the error for a name that several plugins claim."""
    spec = claims[0].spec
    owners = [claim.owner for claim in claims]
    return PluginError(
        f"A {spec.kind} name must be claimed by one plugin, got {spec.key!r}, which is claimed by "
        f"{' and by '.join(owner.label for owner in owners)}, so neither is used. Disable one: "
        f"{' or '.join(f'{DISABLE}={owner.name}' for owner in owners)}."
    )


def rivals(claims: Iterable[Claim[Any]], what: str) -> PluginError:
    """Return the error for a thing that several specs are for."""
    owners = {claim.owner.name: claim.label for claim in claims}
    return PluginError(
        f"One spec must be for {what}, got {' and '.join(owners.values())}. Disable one: "
        f"{' or '.join(f'{DISABLE}={owner}' for owner in owners)}."
    )


def _unknown_disabled(disabled: set[str], installed: tuple[PluginRecord, ...]) -> Iterator[str]:
    known = {found.name for found in installed}
    for name in sorted(disabled - known):
        near = nearest_name(name, known)
        yield f"{DISABLE} names {name!r}, which is not an installed plugin." + (
            f" Did you mean {near!r}?" if near else ""
        )


def _warnings(records: Iterable[PluginRecord]) -> Iterator[str]:
    for record in records:
        if record.status == "failed":
            yield f"{record.label} is left out. {record.reason}"
        elif record.error is not None:
            yield f"{record.label} conflicts. {one_line(record.error)}"
        for note in record.notes:
            yield f"{record.label}: {note}"
