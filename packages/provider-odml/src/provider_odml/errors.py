"""Errors of the on-device provider."""

from __future__ import annotations

from interception_core import JaxtapError


class OdmlError(JaxtapError):
    """Base class of what this package and those that build on it raise on purpose."""


class MissingExtraError(OdmlError, ImportError):
    """A name is used whose package, of one of the extras, is not installed.

    Attributes:
        extra: the extra that brings the package, such as ``"export"``.
    """

    extra: str

    def __init__(self, what: str, package: str, extra: str):
        super().__init__(
            f"{what} is of {package}, which is not installed. Run "
            f"pip install 'provider-odml[{extra}]'."
        )
        self.extra = extra
        self._given = what, package, extra

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str, str]]:
        return type(self), self._given


class ManifestError(OdmlError):
    """Statistics or a manifest that can't be read, or don't fit."""
