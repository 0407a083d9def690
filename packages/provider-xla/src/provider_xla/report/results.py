"""QualityReport: what quantization costs a program, and what it saves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tabulate import tabulate

from ..errors import QuantizationError

SCHEMA = 1
"""The version of what ``as_json`` returns."""

ORDERS = ("program", "sqnr", "error", "flops", "time", "bytes")


@dataclass(frozen=True)
class Error:
    """How far quantized values are from float ones.

    Attributes:
        sqnr_db: the signal-to-quantization-noise ratio in dB, ``10 log10(sum(x**2) /
            sum((q - x)**2))``: infinity where nothing differs, None where nothing was measured,
            where values are not finite, or where the float ones are all 0.
        max_abs_error: the largest ``|q - x|``; None where nothing was measured or it is not
            finite.
    """

    sqnr_db: float | None
    max_abs_error: float | None


@dataclass(frozen=True)
class OpQuality:
    """One operation that is quantized.

    Attributes:
        op_id: see ``interception_core.OpCall``.
        op_name: the name that rules know it by.
        operands: dtype and shape of the operands, as ``f32[8,64]``.
        qtypes: qtype of both operands; None where it stays float.
        rule: index of the rule that decided; None for a lookup that no rule names.
        weight: pytree path of the parameter among the operands, where it is known.
        kernel: the FFI target that computes it; None if XLA does.
        kernel_reason: why XLA computes it.
        calls: how often it runs in one call of the program: steps of loops and mapped examples
            count, branches that are not taken do not. The mean over the batches.
        error: of its quantized result, against its float one on the same float operands.
        steps: the same for each step of the loops that take its parameter in steps; else empty.
        flops: floating-point operations in one call of the program, two per multiplication.
        float_seconds: time of its float form alone, for all calls; None if not measured.
        seconds: time of its quantized form alone, for all calls; None if not measured.
        share: part of the quantized program's time that ``seconds`` is; None if not measured.
    """

    op_id: str
    op_name: str
    operands: tuple[str, ...]
    qtypes: tuple[str | None, str | None]
    rule: int | None
    weight: str | None
    kernel: str | None
    kernel_reason: str | None
    calls: float
    error: Error
    steps: tuple[Error, ...]
    flops: int
    float_seconds: float | None = None
    seconds: float | None = None
    share: float | None = None


@dataclass(frozen=True)
class FloatOp:
    """One operation that stays float.

    Attributes:
        op_id: see ``interception_core.OpCall``.
        op_name: the name that rules know it by.
        operands: dtype and shape of the operands.
        rule: index of the rule that decided, or None.
        reason: why it stays float.
        weight: pytree path of the parameter among the operands, where it is known.
        kernel: the FFI target that computes it; None if XLA does.
        flops: floating-point operations in one call of the program; None where it is not a
            product of floats, or was not seen to run.
    """

    op_id: str
    op_name: str
    operands: tuple[str, ...]
    rule: int | None
    reason: str
    weight: str | None
    kernel: str | None
    flops: int | None


@dataclass(frozen=True)
class ParameterQuality:
    """One parameter.

    Attributes:
        path: its pytree path.
        shape: its shape.
        dtype: its dtype.
        qtype: the name of its quantized type; None if it stays float.
        rule: index of the rule that decided, or None.
        bytes_before: bytes as it is.
        bytes_after: bytes of its codes and scales, packed for a kernel where it is.
        error: of what its codes stand for; None if it stays float.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    qtype: str | None
    rule: int | None
    bytes_before: int
    bytes_after: int
    error: Error | None


@dataclass(frozen=True)
class OutputQuality:
    """One array that the program returns.

    Attributes:
        path: where in the result it is; "" if it is the result.
        shape: its shape, in the last batch.
        dtype: its dtype.
        error: of the quantized program, end to end; None if it is not of floats.
        cosine: cosine between both results, all elements as one vector; None if it is not of
            floats, not finite or 0.
        equal: fraction of its elements that are the same; None if it is of floats.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    error: Error | None
    cosine: float | None
    equal: float | None


@dataclass(frozen=True)
class QualityReport:
    """What quantization costs a program and saves, measured on data. ``print(report)``.

    Attributes:
        ops: the operations that are quantized, in the plan's order.
        float_ops: the operations that stay float, and why.
        parameters: all parameters.
        outputs: the arrays that the program returns: the error end to end.
        problems: where rules can't be followed.
        batches: how many batches were measured.
        platform: where: "cpu", say.
        float_seconds: time of one call of the float program; None if not measured.
        seconds: time of one call of the quantized program; None if not measured.
    """

    ops: tuple[OpQuality, ...]
    float_ops: tuple[FloatOp, ...]
    parameters: tuple[ParameterQuality, ...]
    outputs: tuple[OutputQuality, ...]
    problems: tuple[str, ...]
    batches: int
    platform: str
    float_seconds: float | None = None
    seconds: float | None = None

    @property
    def bytes_before(self) -> int:
        """Bytes of all parameters as they are."""
        return sum(parameter.bytes_before for parameter in self.parameters)

    @property
    def bytes_after(self) -> int:
        """Bytes of all parameters, those that are quantized as they are stored."""
        return sum(parameter.bytes_after for parameter in self.parameters)

    @property
    def bytes_float(self) -> int:
        """Bytes of the parameters that stay as they are."""
        return sum(p.bytes_after for p in self.parameters if p.qtype is None)

    @property
    def flops_quantized(self) -> float | None:
        """Fraction of the floating-point operations of all products that are quantized."""
        quantized = sum(op.flops for op in self.ops)
        total = quantized + sum(op.flops or 0 for op in self.float_ops)
        return quantized / total if total else None

    @property
    def worst_output(self) -> OutputQuality | None:
        """The output of floats with the lowest SQNR; None if there is none."""
        known = [o for o in self.outputs if o.error is not None and o.error.sqnr_db is not None]
        return min(known, key=lambda o: o.error.sqnr_db, default=None)  # type: ignore[union-attr]

    @property
    def rest_share(self) -> float | None:
        """Part of the quantized program's time that is none of ``ops``'; None if not measured."""
        shares = [op.share for op in self.ops if op.share is not None]
        return None if self.seconds is None else max(0.0, 1 - sum(shares))

    def sorted_ops(self, by: str = "program") -> list[OpQuality]:
        """Returns ``ops`` in another order.

        Args:
            by: "program" for that of the plan; "sqnr" and "error", the worst first; "flops",
                "time" and "bytes" (saved by the operation's parameter), the most first.

        Raises:
            ValueError: another order.
        """
        if by not in ORDERS:
            raise ValueError(f"ops can be sorted by {', '.join(ORDERS)}, not by {by!r}.")
        saved = {p.path: p.bytes_before - p.bytes_after for p in self.parameters}
        keys = {
            "program": lambda op: 0,
            "sqnr": lambda op: math.inf if op.error.sqnr_db is None else op.error.sqnr_db,
            "error": lambda op: -(op.error.max_abs_error or 0),
            "flops": lambda op: -op.flops,
            "time": lambda op: -(op.seconds or 0),
            "bytes": lambda op: -saved.get(op.weight or "", 0),
        }
        return sorted(self.ops, key=keys[by])

    def as_json(self) -> dict[str, Any]:
        """Returns the report as JSON values: docs/reports.md describes them.

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
                "outputs": _dicts(self.outputs),
                "ops": _dicts(self.ops),
                "float_ops": _dicts(self.float_ops),
                "parameters": _dicts(self.parameters),
                "problems": list(self.problems),
            }
        )

    def table(self, sort: str = "program", top: int | None = None) -> str:
        """Returns the operations that are quantized as a table.

        Args:
            sort: their order; see ``sorted_ops``.
            top: how many, the first in that order; None for all.
        """
        sizes = {p.path: f"{p.bytes_before:,} -> {p.bytes_after:,}" for p in self.parameters}
        timed = any(op.seconds is not None for op in self.ops)
        headers = ["op", "runs as", "rule", "SQNR dB", "max error", "Mflop", "weight", "bytes"]
        if timed:
            headers[6:6] = ["float ms", "ms", "share"]
        kernels = any(op.kernel is not None for op in self.ops)
        if kernels:
            headers.insert(2, "kernel")
        chosen = self.sorted_ops(sort)[:top]
        rows = []
        for op in chosen:
            row = [
                op.op_id,
                " x ".join(qtype or "float" for qtype in op.qtypes),
                "" if op.rule is None else str(op.rule),
                show_sqnr(op.error.sqnr_db),
                show_error(op.error.max_abs_error),
                f"{op.flops / 1e6:,.3f}",
                op.weight or "",
                sizes.get(op.weight or "", ""),
            ]
            if timed:
                row[6:6] = [show_ms(op.float_seconds), show_ms(op.seconds), show_share(op.share)]
            if kernels:
                row.insert(2, op.kernel or "XLA")
            rows.append(row)
        align = ["right" if name in _RIGHT else "left" for name in headers]
        text = tabulate(rows, headers, tablefmt="simple", disable_numparse=True, colalign=align)
        left = len(self.ops) - len(chosen)
        return f"{text}\nand {left} more" if left else text

    def __str__(self) -> str:
        return self.text()

    def text(self, sort: str = "program", top: int | None = None) -> str:
        """Returns the whole report as text: ``table``, ``summary``, and what stays float."""
        parts = [self.table(sort, top)] if self.ops else []
        parts.append("\n".join(self.summary()))
        if self.float_ops:
            rows = [[op.op_id, op.reason, op.weight or ""] for op in self.float_ops]
            headers = ["stays float", "because", "weight"]
            parts.append(tabulate(rows, headers, tablefmt="simple", disable_numparse=True))
        return "\n\n".join(parts)

    def summary(self) -> list[str]:
        """Returns the report in a few sentences."""
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
                sqnr = show_sqnr(output.error.sqnr_db)
                error = show_error(output.error.max_abs_error)
                lines.append(f"{name}: SQNR {sqnr} dB{cosine}, max error {error}")
        if self.seconds is not None and self.float_seconds is not None:
            before, after = show_ms(self.float_seconds), show_ms(self.seconds)
            lines.append(f"one call on {self.platform}: {before} ms in float, {after} ms quantized")
        lines += [f"problem: {problem}" for problem in self.problems]
        return lines

    def save_json(self, path: str | Path) -> None:
        """Writes ``as_json()``; the file is whole or not there."""
        import json

        write(path, json.dumps(self.as_json(), indent=2, allow_nan=False) + "\n")

    def save_html(self, path: str | Path, title: str = "Quantization report") -> None:
        """Writes one HTML page with plots, which needs no network; it is whole or not there.

        Args:
            path: of the page.
            title: of the page.

        Raises:
            QuantizationError: a library that draws it is missing; it names what to install.
        """
        write(path, load_page()(self, title))


_RIGHT = frozenset({"SQNR dB", "max error", "Mflop", "float ms", "ms", "share", "bytes"})


def load_page() -> Callable[[QualityReport, str], str]:
    """Returns what draws the page.

    Raises:
        QuantizationError: a library that it needs is missing; names what to install.
    """
    try:
        from .page import page
    except ModuleNotFoundError as error:
        raise QuantizationError(
            f"The HTML report needs {error.name}: install provider-xla[report]."
        ) from error
    return page


def write(path: str | Path, text: str) -> None:
    """Writes to a temporary name first, so that ``path`` is whole or not there."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


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


def _dicts(records: Iterable[Any]) -> list[dict[str, Any]]:
    return [dataclasses.asdict(record) for record in records]


def _finite(value: Any) -> Any:
    """Returns JSON values: tuples as lists, None for what is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list | tuple) else value
