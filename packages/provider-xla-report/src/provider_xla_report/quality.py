"""QualityReport: what quantization costs a program, as text, JSON and a page."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from interception_core.report_kit import show_bytes, show_share, show_sqnr
from provider_xla.cli import write_whole
from provider_xla.features import LEAST, fold_lines, fold_rows, joined, table

from .fold import op_rows
from .results import Results, show_error, show_ms, show_ranges

SCHEMA = 2
"""The version of what ``as_json`` returns."""


@dataclass(frozen=True)
class QualityReport(Results):
    """What quantization costs a program on data. ``print(report)`` shows it as tables.

    Attributes: see ``Results``.
    """

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values: docs/reports.md describes them.

        Numbers that are not finite are null.
        """
        worst = self.worst_output
        summary = {
            "ops_quantized": len(self.ops),
            "ops_float": len(self.float_ops),
            "bytes_before": self.bytes_before,
            "bytes_after": self.bytes_after,
            "bytes_float": self.bytes_float,
            "flops_quantized": self.flops_quantized,
            "sqnr_db": None if worst is None or worst.error is None else worst.error.sqnr_db,
            "cosine": None if worst is None else worst.cosine,
            "float_seconds": self.float_seconds,
            "seconds": self.seconds,
            "rest_share": self.rest_share,
        }
        return _finite(
            {
                "schema": SCHEMA,
                "platform": self.platform,
                "batches": self.batches,
                "summary": summary,
                "outputs": self.outputs,
                "ops": [{name: getattr(op, name) for name in _OP} for op in self.ops],
                "float_ops": [
                    {name: getattr(op, name) for name in _FLOAT_OP} for op in self.float_ops
                ],
                "parameters": self.parameters,
                "problems": self.problems,
            }
        )

    def table(self, sort: str = "program", top: int | None = None) -> str:
        """Return the operations that are quantized as a table.

        If there are many, those of equal layers share a row, with the largest error of them and the
        sums of all else.

        Args:
            sort: their order; see ``sorted_ops``.
            top: how many to show, the first in that order; None for all.
        """
        timed = any(op.seconds is not None for op in self.ops)
        headers = ["op", "runs as", "rule", "SQNR dB", "max error", "Mflop", "weight", "bytes"]
        if timed:
            headers[6:6] = ["float ms", "ms", "share"]
        kernels = any(op.kernel is not None for op in self.ops)
        if kernels:
            headers.insert(2, "kernel")
        ranged = any(any(op.ranges) for op in self.ops)
        if ranged:
            headers.append("static range")
        # A table of the first few shows single operations.
        chosen = op_rows(
            self.sorted_ops(sort)[:top], self.parameters, None if top is not None else LEAST
        )
        rows = []
        for op, _, size in chosen:
            row = [
                op.op_id,
                " x ".join(qtype or "float" for qtype in op.qtypes),
                "" if op.rule is None else str(op.rule),
                show_sqnr(op.error.sqnr_db),
                show_error(op.error.max_abs_error),
                f"{op.flops / 1e6:,.3f}",
                joined(op.paths),
                "" if size is None else f"{size[0]:,} -> {size[1]:,}",
            ]
            if timed:
                row[6:6] = [show_ms(op.float_seconds), show_ms(op.seconds), show_share(op.share)]
            if kernels:
                row.insert(2, op.kernel or "XLA")
            if ranged:
                row.append(show_ranges(op.ranges))
            rows.append(row)
        right = [place for place, name in enumerate(headers) if name in _RIGHT]
        text = table(rows, headers, right)
        left = len(self.ops) - sum(len(row.members) for row in chosen)
        return f"{text}\nand {left} more" if left else text

    def __str__(self) -> str:
        return self.text()

    def text(self, sort: str = "program", top: int | None = None) -> str:
        """Return the whole report as text: ``table``, ``summary``, and what stays float."""
        parts = [self.table(sort, top)] if self.ops else []
        parts.append("\n".join(self.summary()))
        if self.float_ops:
            rows = [[op.op_id, op.reason, joined(op.paths)] for op in self.float_ops]
            rows = fold_rows(rows, (0, 1, 2))
            headers = ["stays float", "because", "weight"]
            parts.append(table(rows, headers))
        return "\n\n".join(parts)

    def summary(self) -> list[str]:
        """Return the report in a few sentences."""
        total = len(self.ops) + len(self.float_ops)
        part = self.flops_quantized
        lines = [f"{len(self.ops)} of {total} operations quantized"]
        if part is not None:
            lines[0] += f", {part:.1%} of the multiplications"
        lines.append(
            f"parameters: {show_bytes(self.bytes_before)} -> {show_bytes(self.bytes_after)}, of "
            f"which {show_bytes(self.bytes_float)} stay as they are"
        )
        for output in self.outputs:
            name = f"output {output.path}".rstrip()
            if output.error is None:
                lines.append(f"{name}: {output.equal:.2%} of the elements are the same")
            else:
                cosine = "" if output.cosine is None else f", cosine {output.cosine:.6f}"
                relative, sqnr = output.error.relative, show_sqnr(output.error.sqnr_db)
                error = show_error(output.error.max_abs_error)
                lines.append(
                    f"{name}: relative error {show_error(relative)} (SQNR {sqnr} dB){cosine}, "
                    f"max error {error}"
                )
        if self.seconds is not None and self.float_seconds is not None:
            before, after = show_ms(self.float_seconds), show_ms(self.seconds)
            lines.append(f"one call on {self.platform}: {before} ms in float, {after} ms quantized")
        lines += fold_lines([f"slower than float: {op.op_id}: {op.advice}" for op in self.slower])
        lines += fold_lines([f"problem: {problem}" for problem in self.problems])
        return lines

    def save_json(self, path: str | Path) -> None:
        """Write ``as_json()``; the file is whole or not there."""
        import json

        write_whole(path, json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n")

    def save_html(self, path: str | Path, title: str = "Quantization report") -> None:
        """Save one offline HTML page with plots, whole or not at all.

        Args:
            path: of the page.
            title: of the page.
        """
        from .page import page  # and jinja2, which a report in text does without

        write_whole(path, page(self, title))


_RIGHT = frozenset({"SQNR dB", "max error", "Mflop", "float ms", "ms", "share", "bytes"})


# The keys of operations in JSON, in this order: attributes of OpQuality and of FloatOp.
_RECORD = ("op_id", "op_name", "operands")
_MEASURED = ("calls", "error", "steps", "flops", "float_seconds", "seconds", "share", "ranges")
_OP = (*_RECORD, "qtypes", "rule", "paths", "kernel", "kernel_reason", *_MEASURED)
_FLOAT_OP = (*_RECORD, "rule", "reason", "paths", "kernel", "flops")


def _finite(value: Any) -> Any:
    """Return JSON values: tuples as lists, None for what is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
