"""Numbers of a report as text."""

from __future__ import annotations

import math


def show_sqnr(value: float | None) -> str:
    """Returns decibels for people."""
    if value is None:
        return "-"
    return "exact" if math.isinf(value) else f"{value:.1f}"


def show_error(value: float | None) -> str:
    """Returns an error for people."""
    return "-" if value is None else f"{value:.3g}"


def show_ms(seconds: float | None) -> str:
    """Returns milliseconds for people."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def show_share(share: float | None) -> str:
    """Returns a fraction for people."""
    return "-" if share is None else f"{share:.1%}"


def show_bytes(size: float) -> str:
    """Returns a number of bytes for people."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    digits = 0 if unit == "B" or size >= 100 else 1 if size >= 10 else 2
    return f"{size:,.{digits}f} {unit}"
