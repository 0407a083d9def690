"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from interception_core.report_kit import (
    FIRST,
    SECOND,
    WARN,
    Bar,
    Column,
    Row,
    charts,
    render,
    show_bytes,
    show_share,
    show_sqnr,
)

from ..litert.model import FLOATS
from .verify import WORST

_COLUMNS = (
    Column("Place", choice="program order"),
    Column("Operation", is_number=False),
    Column("Type", is_number=False),
    Column("Scale", is_down=True),
    Column("Zero point"),
    Column("LSB", is_down=True, choice="difference from JAX"),
    Column("SQNR, dB", choice="signal to noise"),
    Column("To float, dB", choice="signal to noise of the float program"),
)


def page(report: Any, title: str) -> str:
    """Return a report as an HTML page.

    Args:
        report: a ``Report``, whose ``to_html`` this is.
        title: its head.
    """
    reasons: dict[str, list[str]] = {}
    for one in report.floats:
        reasons.setdefault(one.reason, []).append(one.operation)
    constants = sum(report.bytes_by_dtype.values())
    return render(
        Path(__file__).with_name("page.html.jinja"),
        title=title,
        report=report,
        size=report.file_bytes or constants,
        constants=constants,
        columns=_COLUMNS,
        reasons=sorted(reasons.items(), key=lambda item: -len(item[1])),
        errors=charts(_error_rows(report), "Signal to noise of each quantized place in decibels"),
        sizes=charts(_size_rows(report, constants), "Bytes of the constants, by type"),
    )


def _error_rows(report: Any) -> list[Row]:
    sites = [(i, one) for i, one in enumerate(report.sites) if not math.isnan(one.float_sqnr)]
    finite = [one.float_sqnr for _, one in sites if math.isfinite(one.float_sqnr)]
    longest = max(*finite, 1.0, 1.0)
    rows = []
    for i, one in sorted(sites, key=lambda pair: pair[1].float_sqnr):
        value, text = one.float_sqnr, show_sqnr(one.float_sqnr)
        is_low = value < WORST.get(one.qtype, 0.0)
        bar = Bar(max(0.0, min(value, longest)), WARN if is_low else FIRST, text)
        tip = f"{one.place}\n{one.op_name}, {one.qtype}\nSQNR {text} dB"
        rows.append(Row(one.place, (bar,), tip, f"#site-{i}"))
    return rows


def _size_rows(report: Any, total: int) -> list[Row]:
    rows = []
    for kind, count in sorted(report.bytes_by_dtype.items(), key=lambda item: -item[1]):
        text = f"{show_bytes(count)}, {show_share(count / total if total else None)}"
        bar = Bar(count, SECOND if kind in FLOATS else FIRST, text)
        rows.append(Row(kind, (bar,), f"{kind}: {text}"))
    return rows
