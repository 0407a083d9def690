"""Errors of saving and loading."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import QuantizationError

if TYPE_CHECKING:
    from .plan_diff import PlanDiff


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
