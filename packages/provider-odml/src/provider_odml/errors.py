"""Errors of the on-device provider."""

from __future__ import annotations

from interception_core import JaxtapError


class OdmlError(JaxtapError):
    """Base class of what this package raises on purpose."""


class ConversionError(OdmlError):
    """The converter did not turn a program into a .tflite.

    Attributes:
        log: everything that the converter printed, with its noise.
    """

    log: str

    def __init__(self, message: str, log: str = ""):
        super().__init__(message)
        self.log = log

    def __reduce__(self) -> tuple[type[ConversionError], tuple[str, str]]:
        return type(self), (str(self), self.log)


class MissingExtraError(OdmlError, ImportError):
    """A library that one of the package's extras brings is not installed.

    Attributes:
        extra: the extra that has it, such as ``"litert"``.
    """

    extra: str

    def __init__(self, module: str, extra: str):
        super().__init__(
            f"{module} must be installed, got none. Run pip install 'provider-odml[{extra}]'."
        )
        self.name = module
        self.extra = extra

    def __reduce__(self) -> tuple[type[MissingExtraError], tuple[str, str]]:
        return type(self), (self.name or "", self.extra)


class MismatchError(OdmlError):
    """What the device computes is not what was trained."""


class OdmlWarning(UserWarning):
    """An exported file is as trained, and far from the float program."""


class ManifestError(OdmlError):
    """Statistics or a manifest that can't be read, or don't fit."""
