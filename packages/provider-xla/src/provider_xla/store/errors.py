"""Errors of saving and loading."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from interception_core import JaxtapError

from ..errors import QuantizationError

if TYPE_CHECKING:
    from .plan_diff import PlanDiff


class StoreError(QuantizationError):
    """A file that can't be read or written: cut short, altered, of another kind, or not fitting."""


class StoreMismatchError(StoreError):
    """A file that holds other parameters than a plan or a template says.

    Attributes:
        diff: what differs.
    """

    diff: PlanDiff

    def __init__(self, message: str, diff: PlanDiff):
        super().__init__(message)
        self.diff = diff

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (str(self), self.diff)


class MissingExtraError(JaxtapError, ImportError):
    """A library that one of the package's extras brings is not installed."""


def require(module: str, extra: str) -> Any:
    """Imports a module of an extra.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not module.startswith(error.name.partition(".")[0]):
            raise
        raise MissingExtraError(
            f"{module} is missing: run pip install 'provider-xla[{extra}]'"
        ) from error


def damaged(path: Path, what: str) -> StoreError:
    """Returns the error of a file that isn't what was written."""
    return StoreError(
        f"{path} is not what was saved: {what}. It was cut short or altered; take another copy, "
        "or save it again."
    )
