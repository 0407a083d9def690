"""Bar charts as inline SVG, with the page's colours and fonts."""

from __future__ import annotations

import collections
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

# Colours are variables of the page, which has one set in light and one in dark.
FIRST = "var(--first)"
"""Colour of the first kind of bar."""
SECOND = "var(--second)"
"""Colour of the second kind of bar."""
WARN = "var(--warn)"
"""Colour of a bar that is a warning."""

_SIZE = 12
_LETTER = 7.2
"""Font size, and about how wide a letter is, in units of the drawing."""
_GAP = 2
_NARROW = 600


@dataclass(frozen=True)
class Bar:
    """One bar of a row.

    Attributes:
        value: its length.
        colour: a CSS colour, such as ``FIRST``.
        text: the text after it.
    """

    value: float
    colour: str
    text: str


@dataclass(frozen=True)
class Row:
    """One or more bars with a name.

    Attributes:
        name: the text at the left of the bars, or above them.
        bars: the bars, from top to bottom.
        tip: the text that a pointer on a bar shows.
        link: the target of a click, such as ``#op-1``, or None.
        marks: values that are marked on the first bar.
    """

    name: str
    bars: tuple[Bar, ...]
    tip: str
    link: str | None = None
    marks: tuple[float, ...] = ()


@dataclass(frozen=True)
class _Layout:
    """Where things are, in units of the drawing.

    Attributes:
        width: the width of the drawing.
        left: where bars begin.
        scale: the length of a bar of value 1.
        thick: the height of a bar.
        is_above: whether a name is above its bars.
    """

    width: float
    left: float
    scale: float
    thick: float
    is_above: bool


def chart(rows: Sequence[Row], width: int, label: str) -> str:
    """Return a chart of horizontal bars as an ``<svg>`` element.

    Args:
        rows: the rows, from top to bottom; at least one.
        width: the width in pixels. Below 600, names are above their bars.
        label: a description of the chart, for screen readers.
    """
    is_above = width < _NARROW
    count = max(len(row.bars) for row in rows)
    thick = 14 if count == 1 else 12
    step = count * (thick + _GAP) + (22 if is_above else 10)
    left = 0 if is_above else min(340, _LETTER * max(len(row.name) for row in rows) + 14)
    room = max(len(bar.text) for row in rows for bar in row.bars) * _LETTER + 8
    longest = max(v for row in rows for v in (*(bar.value for bar in row.bars), *row.marks)) or 1.0
    layout = _Layout(width, left, (width - left - room) / longest, thick, is_above)
    fits = int(((width if is_above else left) - 10) / _LETTER)
    names = shorten_all([row.name for row in rows], fits)
    drawn = "".join(
        _row(row, name, i * step + 3, layout)
        for i, (row, name) in enumerate(zip(rows, names, strict=True))
    )
    return (
        f'<svg viewBox="0 0 {width} {step * len(rows) + 6}" '
        f'role="img" aria-label="{_text(label)}" font-size="{_SIZE}">{drawn}</svg>'
    )


def _row(row: Row, name: str, top: float, layout: _Layout) -> str:
    if layout.is_above:
        parts = [_label(0, top + 7, name)]
        top += 16
    else:
        middle = top + len(row.bars) * (layout.thick + _GAP) / 2
        parts = [_label(layout.left - 10, middle, name, ' text-anchor="end"')]
    tip = f"<title>{_text(row.tip)}</title>"
    for i, bar in enumerate(row.bars):
        y = top + i * (layout.thick + _GAP)
        length = max(bar.value * layout.scale, 1.5)
        shape = (
            f'<rect x="{layout.left:.2f}" y="{y:.2f}" width="{length:.2f}" '
            f'height="{layout.thick}" rx="2" fill="{bar.colour}">{tip}</rect>'
        )
        if row.link is not None:
            shape = f'<a href="{_text(row.link)}">{shape}</a>'
        marked = [mark * layout.scale for mark in row.marks] if i == 0 else []
        x = layout.left + max(length, *marked, 0) + 5
        parts += [shape, _label(x, y + layout.thick / 2, bar.text, fill="var(--muted)")]
    for mark in row.marks:
        x, bottom = layout.left + mark * layout.scale, top + layout.thick - 3
        parts.append(
            f'<path d="M{x:.2f} {top + 3:.2f}V{bottom:.2f}" stroke="var(--ink)" fill="none"/>'
        )
    return "".join(parts)


def _label(x: float, y: float, text: str, more: str = "", fill: str = "var(--ink)") -> str:
    return (
        f'<text x="{x:.2f}" y="{y:.2f}" dominant-baseline="central" fill="{fill}"{more}>'
        f"{_text(text)}</text>"
    )


def _text(text: str) -> str:
    """Return text as markup, without letters that XML can't hold."""
    return escape("".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text))


def shorten_all(names: Sequence[str], size: int) -> list[str]:
    """Return names of at most ``size`` letters that keep what tells them apart.

    Names are paths, such as ``layers/3/mlp/matmul:0`` and ``args[0]['up']``. Of one that is too
    long, the parts that most of the names have are left out first, and the last part last.
    """
    found = [_PARTS.split(name) for name in names]
    counts = collections.Counter(part for parts in found for part in {*parts})
    return [_without(parts, counts, size) for parts in found]


_PARTS = re.compile(r"(?<=/)|(?=\[)")
"""Where a path has an end of a part."""


def _without(parts: Sequence[str], counts: Mapping[str, int], size: int) -> str:
    """Return a path without as many parts as it takes, those of most names first."""
    kept = [True] * len(parts)
    # Of equally common parts the outer ones: those near the end say what it is.
    for i in sorted(range(len(parts) - 1), key=lambda i: -counts[parts[i]]):
        if len(_shown(parts, kept)) <= size:
            break
        kept[i] = False
    return shorten(_shown(parts, kept), size)


def _shown(parts: Sequence[str], kept: Sequence[bool]) -> str:
    runs = itertools.groupby(zip(parts, kept, strict=True), key=lambda one: one[1])
    return "".join("".join(part for part, _ in run) if is_kept else "…" for is_kept, run in runs)


def shorten(text: str, size: int) -> str:
    """Return a text without its middle if it is too long."""
    if len(text) <= size:
        return text
    tail = max(1, math.ceil((size - 1) * 0.6))
    return f"{text[: max(1, size - 1 - tail)]}…{text[-tail:]}"
