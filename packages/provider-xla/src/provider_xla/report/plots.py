"""Bar charts as SVG that takes its colours and fonts from the page around it."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from xml.etree import ElementTree

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID = "#010101", "#020202", "#030303"
FIRST, SECOND, WARN = "#040404", "#050505", "#060606"
_VARIABLES = {
    INK: "var(--ink)",
    MUTED: "var(--muted)",
    GRID: "var(--line)",
    FIRST: "var(--first)",
    SECOND: "var(--second)",
    WARN: "var(--warn)",
}
"""By the colour that is drawn with, the page's: it has one in light and one in dark."""

_SIZE = 12
_LETTER = 7.2
"""Font size, and about how wide a letter is, in units of the drawing."""
_STYLE = {
    "svg.fonttype": "none",
    "svg.hashsalt": "jaxtap",
    "font.size": _SIZE,
    "text.parse_math": False,
    "text.usetex": False,
}


@dataclass(frozen=True)
class Bar:
    """One value in a row: how long, in which colour, and what is written behind it."""

    value: float
    colour: str
    text: str


@dataclass(frozen=True)
class Row:
    """One or more bars with a name.

    Attributes:
        name: at the left, or above the bars.
        bars: from top to bottom.
        tip: what a pointer on them shows.
        link: where they lead to in the page, as ``#op-1``; None for nowhere.
        marks: values that are marked on the first bar.
    """

    name: str
    bars: tuple[Bar, ...]
    tip: str
    link: str | None = None
    marks: tuple[float, ...] = ()


def chart(rows: Sequence[Row], width: int, label: str, key: str) -> str:
    """Returns a chart of horizontal bars as an ``<svg>`` element.

    Args:
        rows: from top to bottom; at least one.
        width: in pixels; names are above their bars where it is small.
        label: what it shows, for those who can't see it.
        key: a word that begins its ids: another for each chart of a page.
    """
    above = width < 600
    count = max(len(row.bars) for row in rows)
    thick = 14 if count == 1 else 12
    step = count * (thick + 2) + (22 if above else 10)
    height = step * len(rows) + 6
    left = 0 if above else min(340, _LETTER * max(len(row.name) for row in rows) + 14)
    room = max(len(bar.text) for row in rows for bar in row.bars) * _LETTER + 8
    values = [bar.value for row in rows for bar in row.bars]
    longest = max([*values, *(mark for row in rows for mark in row.marks)]) or 1.0
    with matplotlib.rc_context(_STYLE), warnings.catch_warnings():
        # Letters that its font lacks: the page draws them, with its own.
        warnings.filterwarnings("ignore", "Glyph .* missing")
        figure = Figure(figsize=(width / 72, height / 72), dpi=72)
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        axes.set_xlim(0, width)
        axes.set_ylim(height, 0)
        scale = (width - left - room) / longest
        for i, row in enumerate(rows):
            _draw(axes, row, i, i * step + 3, left, scale, thick, above, width)
        file = io.StringIO()
        figure.savefig(file, format="svg", transparent=True, metadata=dict.fromkeys(_METADATA))
    return _inline(file.getvalue(), rows, label, key)


_METADATA = ("Creator", "Date", "Format", "Type")


def _draw(
    axes: Axes,
    row: Row,
    number: int,
    top: float,
    left: float,
    scale: float,
    thick: float,
    above: bool,
    width: float,
) -> None:
    middle = top + len(row.bars) * (thick + 2) / 2
    fits = int(((width if above else left) - 10) / _LETTER)
    name = shorten(_printable(row.name), fits)
    if above:
        axes.text(0, top + 7, name, color=INK, va="center", ha="left", fontsize=_SIZE)
        top += 16
    else:
        axes.text(left - 10, middle, name, color=INK, va="center", ha="right", fontsize=_SIZE)
    for i, bar in enumerate(row.bars):
        y = top + i * (thick + 2)
        length = max(bar.value * scale, 1.5)
        (drawn,) = axes.barh(y, length, thick, left=left, align="edge", color=bar.colour)
        drawn.set_gid(f"row-{number}")
        if row.link is not None:
            drawn.set_url(row.link)
        end = max([length, *(mark * scale for mark in row.marks)] if i == 0 else [length])
        axes.text(
            left + end + 5, y + thick / 2, bar.text, color=MUTED, va="center", fontsize=_SIZE - 1
        )
    for mark in row.marks:
        x = left + mark * scale
        axes.plot([x, x], [top + 3, top + thick - 3], color=INK, linewidth=1)


def _printable(text: str) -> str:
    """Returns text that XML can hold."""
    return "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)


def shorten(text: str, size: int) -> str:
    """Returns ``text``, without its middle where it is longer than ``size`` letters."""
    if len(text) <= size:
        return text
    tail = max(1, math.ceil((size - 1) * 0.6))
    return f"{text[: max(1, size - 1 - tail)]}…{text[-tail:]}"


def _inline(text: str, rows: Sequence[Row], label: str, key: str) -> str:
    """Returns an SVG file as an element of an HTML page."""
    for colour, variable in _VARIABLES.items():
        text = text.replace(colour, variable)
    root = ElementTree.fromstring(text)
    tips = {f"row-{i}": row.tip for i, row in enumerate(rows)}
    links = {row.link for row in rows}
    used = set(re.findall(r'(?:url\(#|href="#)([^)"]+)', text))
    for parent in list(root.iter()):
        for child in list(parent):
            # Its style would be the page's.
            if child.tag.endswith(("}style", "}metadata")):
                parent.remove(child)
    for element in root.iter():
        element.tag = element.tag.rpartition("}")[2]
        name = element.get("id")
        if name is not None:
            del element.attrib["id"]
            if name in tips:
                title = ElementTree.Element("title")
                title.text = _printable(tips[name])
                element.insert(0, title)
            if name in used:
                element.set("id", f"{key}-{name}")
        for attribute, value in list(element.attrib.items()):
            del element.attrib[attribute]
            if attribute.rpartition("}")[2] == "href" and value.startswith("#"):
                # To what is defined in here; or to a row of the page's table.
                value = value if value in links else f"#{key}-{value[1:]}"
            value = value.replace("url(#", f"url(#{key}-")
            element.set(attribute.rpartition("}")[2], value)
    for attribute in ("width", "height", "version"):
        root.attrib.pop(attribute, None)
    root.set("role", "img")
    root.set("aria-label", label)
    return ElementTree.tostring(root, encoding="unicode")
