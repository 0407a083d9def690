"""The report as one HTML page that needs nothing else."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from interception_core.report_kit import (
    FIRST,
    SECOND,
    SHOWN,
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
from provider_xla.features import fold_lines

from .fold import float_rows, op_rows, parameter_rows
from .results import OpQuality, Results, show_error, show_ms, show_ranges

LOW = 20.0
"""Decibels below which the error is over a tenth of the signal."""
_COLUMNS = (
    Column("Operation", choice="program order"),
    Column("Runs as", is_number=False),
    Column("SQNR, dB", choice="signal to noise"),
    Column("Largest error", is_down=True, choice="largest error"),
    Column("Mflop", is_down=True, choice="multiplications"),
    Column("Bytes", is_down=True, choice="bytes saved"),
    Column("Time, ms", is_down=True, choice="time"),
    Column("Share", is_down=True),
)


def page(report: Results, title: str) -> str:
    """Return the page."""
    numbers = {op.op_id: i for i, op in enumerate(report.ops)}
    reasons: dict[str, list[Any]] = {}
    for op in report.float_ops:
        reasons.setdefault(op.reason, []).append(op)
    by_work = sorted(reasons.items(), key=lambda one: -sum(op.flops or 0 for op in one[1]))
    kept = sorted((p for p in report.parameters if p.qtype is None), key=lambda p: -p.bytes_before)
    timed = report.seconds is not None
    return render(
        Path(__file__).with_name("page.html.jinja"),
        title=title,
        columns=_COLUMNS[: 8 if timed else 6],
        report=report,
        worst=report.worst_output,
        rows=op_rows(report.ops, report.parameters),
        numbers=numbers,
        reasons=[(reason, len(ops), float_rows(ops)) for reason, ops in by_work],
        kept=parameter_rows(kept),
        kept_count=len(kept),
        timed=timed,
        errors=charts(*_error_rows(report, numbers)),
        weights=charts(*_size_rows(report)),
        times=charts(*_time_rows(report, numbers)),
        slower=fold_lines([f"{op.op_id}: {op.advice}" for op in report.slower]),
        low=LOW,
        error=show_error,
        ms=show_ms,
        ranges=show_ranges,
    )


def _error_rows(report: Results, numbers: dict[str, int]) -> tuple[list[Row], str]:
    measured = [op for op in report.sorted_ops("sqnr") if op.error.sqnr_db is not None]
    known = [op.error.sqnr_db for op in measured if not math.isinf(op.error.sqnr_db or 0)]
    longest = max([*(value for value in known if value is not None), 1.0])
    rows = []
    folds = op_rows(measured, report.parameters, SHOWN)
    folds.sort(key=lambda row: -math.inf if row.op.error.sqnr_db is None else row.op.error.sqnr_db)
    for op, members, _ in folds:
        value = op.error.sqnr_db
        assert value is not None
        steps = [one.sqnr_db for one in op.steps if one.sqnr_db is not None]
        marks = tuple(min(max(step, 0.0), longest) for step in steps if math.isfinite(step))
        text = show_sqnr(value)
        if len(members) > 1:
            text += f", the worst of {len(members)}"
        if marks:
            text += f"  (steps {min(marks):.1f} to {max(marks):.1f})"
        bar = Bar(max(0.0, min(value, longest)), WARN if value < LOW else FIRST, text)
        tip = f"{op.op_id}\n{_runs_as(op)}\nSQNR {show_sqnr(value)} dB\n" + (
            f"largest error {show_error(op.error.max_abs_error)}"
        )
        link = f"#op-{numbers[members[0].op_id]}"
        rows.append(Row(op.op_id, (bar,), tip, link, marks))
    return rows, "Signal-to-noise ratio of each operation in decibels, the worst first"


def _size_rows(report: Results) -> tuple[list[Row], str]:
    rows = []
    quantized = [one for one in report.parameters if one.qtype is not None]
    found = parameter_rows(quantized, SHOWN)
    for one in sorted(found, key=lambda row: -row.bytes("bytes_before")):
        several = f", {one.count} parameters" if one.count > 1 else ""
        sizes = one.bytes("bytes_before"), one.bytes("bytes_after")
        before = Bar(sizes[0], SECOND, show_bytes(sizes[0]) + several)
        after = Bar(sizes[1], FIRST, f"{show_bytes(sizes[1])}, {one.first.qtype}")
        tip = f"{one.name}\n{before.text} -> {after.text}"
        rows.append(Row(one.name, (before, after), tip))
    return rows, "Bytes of each parameter before and after, the largest first"


def _time_rows(report: Results, numbers: dict[str, int]) -> tuple[list[Row], str]:
    rows = []
    timed = [op for op in report.ops if op.seconds is not None and op.float_seconds is not None]
    folds = op_rows(timed, report.parameters, SHOWN)
    for op, members, _ in sorted(folds, key=lambda row: -(row.op.seconds or 0)):
        assert op.seconds is not None
        assert op.float_seconds is not None
        before = Bar(op.float_seconds, SECOND, f"{show_ms(op.float_seconds)} ms")
        text = f"{show_ms(op.seconds)} ms, {show_share(op.share)}"
        tip = f"{op.op_id}\nfloat {before.text}\nquantized {text} of the program"
        if len(members) > 1:
            text += f", {len(members)} operations"
        colour = WARN if op.is_slower else FIRST
        link = f"#op-{numbers[members[0].op_id]}"
        rows.append(Row(op.op_id, (before, Bar(op.seconds, colour, text)), tip, link))
    return rows, "Time of each operation in float and quantized, the longest first"


def _runs_as(op: OpQuality) -> str:
    return " x ".join(qtype or "float" for qtype in op.qtypes)
