"""Numbers of a report as text."""

from __future__ import annotations

from collections.abc import Sequence

from .results import Range


def show_error(value: float | None) -> str:
    """Return an error for people."""
    return "-" if value is None else f"{value:.3g}"


def show_ms(seconds: float | None) -> str:
    """Return milliseconds for people."""
    if seconds is None:
        return "-"
    value = seconds * 1e3
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3
    return f"{value:,.{digits}f}"


def show_ranges(ranges: Sequence[Range | None]) -> str:
    """Return an operation's static ranges; of steps, least and largest."""
    return "; ".join(show_range(one) for one in ranges if one is not None)


def show_range(one: Range) -> str:
    """Return a static range as ``[-1, 2]``, or ``±2``."""
    if not one.steps:
        return _bounds(one, 0)
    sizes = [u - (one.lower[i] if one.lower else 0.0) for i, u in enumerate(one.upper)]
    least, largest = sizes.index(min(sizes)), sizes.index(max(sizes))
    count = " x ".join(map(str, one.steps))
    return f"{_bounds(one, least)} to {_bounds(one, largest)} in {count} steps"


def _bounds(one: Range, i: int) -> str:
    upper = f"{one.upper[i]:.3g}"
    return f"±{upper}" if one.lower is None else f"[{one.lower[i]:.3g}, {upper}]"
