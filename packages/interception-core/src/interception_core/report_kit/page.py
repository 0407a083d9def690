"""Pages: a report as one HTML page, without other files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from .bars import Row, chart
from .numbers import show_bytes, show_share, show_sqnr, sort_key

SHOWN = 40
"""Rows of a chart; the table has all."""
_WIDTHS = {"wide": 1060, "narrow": 360}


@dataclass(frozen=True)
class Column:
    """A column of a table that readers sort.

    Attributes:
        name: its head.
        is_number: whether it is sorted by numbers, and aligned to the right.
        is_down: whether the largest comes first.
        choice: what it is called in the list for phones, whose tables have no heads; None leaves
            it out.
    """

    name: str
    is_number: bool = True
    is_down: bool = False
    choice: str | None = None


def render(template: Path, **values: Any) -> str:
    """Return a page.

    Args:
        template: a Jinja file that extends ``base.html.jinja`` of this folder. It can import
            ``macros.html.jinja``, and has the filters `bytes`, `share` and `sqnr`, and
            `sort_key` for the attribute ``data-key`` of cells.
        values: what it reads. All text is escaped.
    """
    environment = Environment(
        loader=FileSystemLoader([template.parent, Path(__file__).parent]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": show_bytes, "share": show_share, "sqnr": show_sqnr}
    return environment.get_template(template.name).render(values, sort_key=sort_key)


def charts(rows: Sequence[Row], label: str) -> dict[str, Any] | None:
    """Return a wide and a narrow chart; None without rows.

    Args:
        rows: from top to bottom; the first ``SHOWN`` are drawn.
        label: what the chart shows, for screen readers.

    Returns:
        The markup as ``wide`` and ``narrow``, and how many rows are ``shown`` and ``left``.
    """
    if not rows:
        return None
    drawn = {name: Markup(chart(rows[:SHOWN], width, label)) for name, width in _WIDTHS.items()}
    return {**drawn, "left": len(rows) - len(rows[:SHOWN]), "shown": len(rows[:SHOWN])}
