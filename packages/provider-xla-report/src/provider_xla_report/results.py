"""Results: what was measured of a program, what it saves, and its numbers as text."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from provider_xla import OpRecord

from .command import ORDERS

SLOWER = 1.1
"""How many times the float time is slower: less is noise."""


@dataclass(frozen=True)
class Error:
    """How far quantized values are from float ones.

    Attributes:
        sqnr_db: the signal-to-quantization-noise ratio in dB, ``10 log10(sum(x**2) /
            sum((q - x)**2))``: infinity if nothing differs; None if nothing was measured, values
            are not finite, or the float ones are all 0.
        max_abs_error: the largest ``|q - x|``; None where nothing was measured or it is not
            finite.
    """

    sqnr_db: float | None
    max_abs_error: float | None

    @property
    def relative(self) -> float | None:
        """The norm of the error over that of the float values; None where SQNR is."""
        return None if self.sqnr_db is None else 10 ** (-self.sqnr_db / 20)


@dataclass(frozen=True)
class Range:
    """The static range of an activation.

    Attributes:
        upper: the upper bound; of each step, row by row, where steps have a range each.
        lower: the lower bound; None where the range is symmetric.
        steps: lengths of the loops whose steps have a range each, the outermost first.
    """

    upper: tuple[float, ...]
    lower: tuple[float, ...] | None = None
    steps: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class OpQuality(OpRecord):
    """One operation that is quantized: the plan's record, and what was measured.

    Attributes:
        calls: how often it runs in one call of the program: steps of loops and mapped examples
            count, branches that are not taken do not. The mean over the batches.
        error: the error of its quantized result, against the float result of the same operands.
        steps: the error at each step of the loops that take its parameter in steps; else empty.
        flops: floating-point operations in one call of the program, two per multiplication.
        float_seconds: seconds of its float form alone, for all calls; None if not measured.
        seconds: seconds of its quantized form alone, for all calls; None if not measured.
        share: share of ``seconds`` in the quantized program's time; None if not measured.
        ranges: the static range of both operands; None where it has none.
    """

    calls: float
    error: Error
    steps: tuple[Error, ...]
    flops: int
    float_seconds: float | None = None
    seconds: float | None = None
    share: float | None = None
    ranges: tuple[Range | None, Range | None] = (None, None)

    @property
    def is_slower(self) -> bool:
        """Whether it was measured to take longer than in float, by more than noise."""
        if self.seconds is None or self.float_seconds is None:
            return False
        return self.seconds > SLOWER * self.float_seconds

    @property
    def advice(self) -> str:
        """What to do where it is slower than in float."""
        why = "its kernel gains nothing here" if self.kernel else "XLA computes it"
        if self.kernel_reason and not self.kernel:
            why += f", {self.kernel_reason}"
        # Rules match the path without the loops and calls that ids have.
        path = "/".join(part for part in self.op_id.split("/")[:-1] if "(" not in part)
        rule = f"Rule({re.escape(path)!r})" if path else f"Rule(ops={self.op_name!r})"
        return f"{why}; {rule} before the other rules leaves it float"


@dataclass(frozen=True, kw_only=True)
class FloatOp(OpRecord):
    """One operation that stays float: the plan's record, and its size.

    Attributes:
        flops: floating-point operations in one call of the program; None where it is not a
            contraction of floats, or was not seen to run.
    """

    flops: int | None

    @property
    def reason(self) -> str:
        """Return in words why it stays float."""
        return super().reason or "computed in float by one kernel"


@dataclass(frozen=True)
class ParameterQuality:
    """One parameter.

    Attributes:
        path: its pytree path.
        shape: its shape.
        dtype: its dtype.
        qtype: the name of its quantized type; None if it stays float.
        rule: index of the rule that decided, or None.
        bytes_before: bytes of the float array.
        bytes_after: bytes of its quantized values and scales, packed if it is packed for a kernel.
        error: the error of its dequantized values; None if it stays float.
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
        error: the error of the quantized program, end to end; None if it does not hold floats.
        cosine: cosine between both results, all elements as one vector; None if it does not hold
            floats, or is not finite or 0.
        equal: fraction of its elements that are equal in both; None if it holds floats.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    error: Error | None
    cosine: float | None
    equal: float | None


@dataclass(frozen=True)
class Results:
    """What quantization costs a program and saves, measured on data. ``print(report)``.

    Attributes:
        ops: the operations that are quantized, in the plan's order.
        float_ops: the operations that stay float, and why.
        parameters: all parameters.
        outputs: the arrays that the program returns: the error end to end.
        problems: where rules can't be followed.
        batches: how many batches were measured.
        platform: the platform that it was measured on, such as "cpu".
        float_seconds: seconds of one call of the float program; None if not measured.
        seconds: seconds of one call of the quantized program; None if not measured.
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
        """Return the bytes of all float parameters."""
        return sum(parameter.bytes_before for parameter in self.parameters)

    @property
    def bytes_after(self) -> int:
        """Return the bytes of all parameters as stored."""
        return sum(parameter.bytes_after for parameter in self.parameters)

    @property
    def bytes_float(self) -> int:
        """Return the bytes of parameters that stay float."""
        return sum(p.bytes_after for p in self.parameters if p.qtype is None)

    @property
    def flops_quantized(self) -> float | None:
        """Fraction of the floating-point operations of all contractions that are quantized."""
        quantized = sum(op.flops for op in self.ops)
        total = quantized + sum(op.flops or 0 for op in self.float_ops)
        return quantized / total if total else None

    @property
    def worst_output(self) -> OutputQuality | None:
        """Return the float output with the lowest SQNR, or None."""
        known = [o for o in self.outputs if o.error is not None and o.error.sqnr_db is not None]
        return min(known, key=lambda o: o.error.sqnr_db, default=None)  # type: ignore[union-attr]

    @property
    def slower(self) -> tuple[OpQuality, ...]:
        """The operations that take longer than in float, those that lose most first."""
        found = [op for op in self.ops if op.is_slower]
        lost = {op.op_id: (op.seconds or 0) - (op.float_seconds or 0) for op in found}
        return tuple(sorted(found, key=lambda op: -lost[op.op_id]))

    @property
    def rest_share(self) -> float | None:
        """Return the share of time outside ``ops``; None if not measured."""
        shares = [op.share for op in self.ops if op.share is not None]
        return None if self.seconds is None else max(0.0, 1 - sum(shares))

    def sorted_ops(self, by: str = "program") -> list[OpQuality]:
        """Return ``ops`` in another order.

        Args:
            by: "program" for that of the plan; "sqnr" and "error", the worst first; "flops",
                "time" and "bytes" (saved by the operation's parameters), the most first.

        Raises:
            ValueError: ``by`` is another order.
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
            "bytes": lambda op: -sum(saved.get(path, 0) for path in op.paths),
        }
        return sorted(self.ops, key=keys[by])


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
