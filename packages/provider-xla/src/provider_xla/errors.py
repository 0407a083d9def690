"""Errors and warnings of the providers, and of saving and loading."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from interception_core import JaxtapError


class QuantizationError(JaxtapError, ValueError):
    """Rules, parameters or arguments that do not fit each other."""


def check_has(found: Any, name: str, what: str) -> None:
    """Raise QuantizationError where a plan or report of another provider lacks a method."""
    if not hasattr(found, name):
        raise QuantizationError(
            f"{what} needs {name}(), got a {type(found).__name__} without. See "
            "interception_core.ProviderPlan."
        )


class QuantizationWarning(UserWarning):
    """Rules that can be followed only in part; errors with ``strict=True``."""


@dataclasses.dataclass(frozen=True)
class PlanDiff:
    """What differs between stored parameters and a plan; false where nothing does.

    Attributes:
        changed: by the name of a leaf, each difference as (what, stored, planned).
        missing: what each leaf is that the plan has and the file lacks, by name.
        extra: what each leaf is that the file has and the plan lacks, by name.
        rules: each difference of the rules, or of another provider's manifest, as a line. If only
            rules differ, the parameters fit.
    """

    changed: Mapping[str, Sequence[tuple[str, str, str]]]
    missing: Mapping[str, str]
    extra: Mapping[str, str]
    rules: Sequence[str] = ()

    @property
    def of_leaves(self) -> bool:
        """Return whether leaves differ, and not the rules alone."""
        return bool(self.changed or self.missing or self.extra)

    def __bool__(self) -> bool:
        return self.of_leaves or bool(self.rules)

    def __str__(self) -> str:
        lines = []
        if self.changed:
            lines.append("leaves that differ (stored -> planned):")
        for name, found in self.changed.items():
            lines.append(f"  {name}: " + "; ".join(f"{what} {a} -> {b}" for what, a, b in found))
        for title, names in (("missing in the file", self.missing), ("only there", self.extra)):
            if names:
                lines.append(f"{title}:")
                lines.extend(f"  {name}: {what}" for name, what in names.items())
        if self.rules:
            lines.append("rules that differ (stored -> planned):")
            lines.extend(f"  {line}" for line in self.rules)
        return "\n".join(lines) or "no difference"


class StoreError(QuantizationError):
    """A file that cannot be read or written, or does not fit."""


class StoreMismatchError(StoreError):
    """A file whose parameters differ from a plan or template.

    Attributes:
        diff: what differs.
    """

    diff: PlanDiff

    def __init__(self, message: str, diff: PlanDiff):
        super().__init__(message)
        self.diff = diff

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.diff)


def damaged(path: Path, what: str) -> StoreError:
    """Return the error of a file that isn't what was written."""
    return StoreError(
        f"{path} is corrupted: {what}. It was cut short or altered; take another copy, "
        "or save it again."
    )
