"""Errors of exporting."""

from __future__ import annotations

from provider_odml import OdmlError


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


class MismatchError(OdmlError):
    """What the device computes is not what was trained."""


class OdmlWarning(UserWarning):
    """An exported file is as trained, and far from the float program."""
