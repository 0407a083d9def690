"""Errors and warnings of the providers."""

from __future__ import annotations

from interception_core import JaxtapError


class QuantizationError(JaxtapError, ValueError):
    """Rules, parameters or arguments that do not fit each other."""


class QuantizationWarning(UserWarning):
    """Rules that can be followed only in part; errors with ``strict=True``."""
