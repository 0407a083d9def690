"""Numbers of reports as text for people."""

from __future__ import annotations

import math


def show_sqnr(value: float | None) -> str:
    """Return decibels with one digit; "-" for what is not known."""
    if value is None:
        return "-"
    if math.isnan(value):
        return "not a number"
    return ("exact" if value > 0 else "none") if math.isinf(value) else f"{value:.1f}"


def show_share(share: float | None) -> str:
    """Return a fraction as percents; "-" for what is not known."""
    return "-" if share is None else f"{share:.1%}"


def show_bytes(size: float) -> str:
    """Return a number of bytes in B, KiB, MiB or GiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            break
        size /= 1024
    digits = 0 if unit == "B" or size >= 100 else 1 if size >= 10 else 2
    return f"{size:,.{digits}f} {unit}"


def sort_key(value: float | None) -> str:
    """Return a number as the page's script sorts it."""
    if value is None or math.isnan(value):
        return "Infinity"
    return repr(max(min(float(value), 1e300), -1e300))  # exact is the best there is
