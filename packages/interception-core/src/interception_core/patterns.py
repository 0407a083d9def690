"""Patterns: regular expressions of rules, matched in limited time."""

from __future__ import annotations

import regex

from .errors import JaxtapError

# A path is matched in microseconds. A pattern that needs seconds backtracks exponentially.
LIMIT_S = 2.0


def check_pattern(pattern: str) -> None:
    """Check that ``pattern`` is a regular expression.

    Args:
        pattern: in the syntax of Python's ``re``.

    Raises:
        TypeError: it is not a string.
        ValueError: it is not a regular expression. The message tells the position.
    """
    try:
        regex.compile(pattern, regex.ASCII)
    except regex.error as error:
        raise ValueError(str(error)) from error


def matches_path(pattern: str, path: str) -> bool:
    """Return whether ``pattern`` matches the whole of ``path``.

    Args:
        pattern: a regular expression in the syntax of Python's ``re``. Classes such as ``\\w`` are
            ASCII.
        path: a module path or pytree path, such as ``"encoder/layer_0/attention"``.

    Raises:
        JaxtapError: the match takes longer than ``LIMIT_S`` seconds.
    """
    try:
        return regex.fullmatch(pattern, path, regex.ASCII, timeout=LIMIT_S) is not None
    except TimeoutError:
        raise JaxtapError(
            f"The pattern {pattern!r} must match a path within {LIMIT_S:g} s, got {path!r}, for "
            "which it needs longer. Write it without a repeat of a repeat, such as '(a+)+'."
        ) from None
