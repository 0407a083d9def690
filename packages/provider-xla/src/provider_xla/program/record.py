"""What a plan says of operations: rules and kernels as a table, held against other programs."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import quant_numerics as qn
from interception_core import OpCall, kernel_platforms, platform_of, select_kernel
from quant_numerics import Contraction, Convolution, Matmul, RaggedMatmul

from ..errors import QuantizationError
from ..tables import fold_rows
from ..tables import table as show_table
from .facts import IN_PARTS, Code, Fact, joined

_WITH_PARTS = ("dot", "einsum", "matmul", "ragged_dot")
"""Operations that consist of others which rules can name."""

_IN_JSON = ("op_id", "op_name", "operands", "qtypes", "rule", "reason", "paths", "adapter")
_IN_JSON += ("module_path", "chained_to")


class Choice(NamedTuple):
    """What computes an operation on a platform.

    Attributes:
        kernel: the FFI target of the kernel; None for XLA.
        reason: why XLA computes it; None with a kernel.
        is_lookup: whether it is a lookup in a parameter that no kernel reads.
    """

    kernel: str | None
    reason: str | None
    is_lookup: bool = False


def lookup_id(call: OpCall) -> str:
    """Return the id of a lookup, which a gather shows under the name that rules have for it."""
    return call.op_id.replace("gather:", "take:")


def platforms(first: str | None = None) -> tuple[str, ...]:
    """Return the platforms that kernels are chosen for, that of the parameters first."""
    first = platform_of() if first is None else first
    return (first, *(name for name in kernel_platforms() if name != first))


def choice(op: str, platform: str, operands: Sequence[Any], **question: Any) -> Choice:
    """Return a call's kernel on a platform, or why it has none."""
    spec, why = select_kernel(op, platform, operands, **question)
    return Choice(None, why) if spec is None else Choice(spec.target, None)


def choices(op: str, operands: Sequence[Any]) -> dict[str, Choice]:
    """Return a call's kernel on each platform, or why it has none."""
    return {platform: choice(op, platform, operands) for platform in platforms()}


def shown(kernels: Mapping[str, Choice]) -> str:
    """Return what computes an operation, in a few words."""
    by_target: dict[str, list[str]] = {}
    for platform, one in kernels.items():
        by_target.setdefault(one.kernel or "XLA", []).append(platform)
    if len(kernels) == 1:
        return next(iter(by_target))
    return ", ".join(f"{target} ({', '.join(names)})" for target, names in by_target.items())


@dataclass(frozen=True, slots=True)
class OpRecord:
    """One operation.

    Attributes:
        op_id: see ``interception_core.OpCall``.
        op_name: the name that rules know it by.
        operands: dtype and shape of the operands, as ``f32[8,64]``.
        qtypes: qtype of both operands; None where it stays float.
        rule: index of the rule that decided, or None.
        why: why the operation stays float; None if it is quantized.
        paths: pytree paths of the parameters behind the operands.
        beside: those of other parameters of which its activations are made.
        kernels: in a plan, what computes it on each platform; the first is where parameters are.
        adapter: in a plan, the label of the adapter that its parameter has, such as ``"rank 8"``;
            None if it has none.
        module_path: the name stack around it, which rules match.
        chained_to: in a plan, the id of the convolution whose results it reads as int8; None for
            one that quantizes its activation.
        subject: of a quantized contraction, see ``program.decided.subject_of``.
    """

    op_id: str
    op_name: str
    operands: tuple[str, ...]
    qtypes: tuple[str | None, str | None]
    rule: int | None
    why: Fact | None
    paths: tuple[str, ...] = ()
    kernels: Mapping[str, Choice] = field(default_factory=dict)
    adapter: str | None = None
    module_path: str = ""
    beside: tuple[str, ...] = ()
    subject: Any = None
    chained_to: str | None = None

    @property
    def reason(self) -> str | None:
        """Return in words why it stays float; None if it is quantized."""
        return None if self.why is None else str(self.why)

    @property
    def kernel(self) -> str | None:
        """Return the FFI target where parameters are; None for XLA."""
        return next((one.kernel for one in self.kernels.values()), None)

    @property
    def kernel_reason(self) -> str | None:
        """Why XLA computes it where parameters are."""
        return next((one.reason for one in self.kernels.values()), None)

    @property
    def quantized(self) -> bool:
        """Return whether at least one operand is quantized."""
        return any(self.qtypes)

    @property
    def is_in_parts(self) -> bool:
        """Return whether it stays float because its parts are records."""
        if self.quantized or self.op_name not in _WITH_PARTS:
            return False
        return self.rule is None or (self.why is not None and self.why.code in IN_PARTS)


class Report(tuple[OpRecord, ...]):
    """The operations of a program, in order of first appearance.

    ``print(report)`` shows it as a table.
    """

    __slots__ = ()

    def as_json(self) -> list[dict[str, Any]]:
        """Return the records as JSON values."""
        return [
            {
                **{name: getattr(record, name) for name in _IN_JSON},
                "kernels": {
                    name: {"kernel": one.kernel, "reason": one.reason}
                    for name, one in record.kernels.items()
                },
            }
            for record in self
        ]

    def table(
        self, sizes: Mapping[str, tuple[int, int]] | None = None, *, fold: bool = True
    ) -> str:
        """Return the operations as a table.

        Args:
            sizes: by weight, its bytes before and after; None leaves them out.
            fold: whether operations of equal layers share a row if there are many, such as
                ``layer_[0-79]/matmul:0``; bytes are those of each.
        """
        headers = ["op", "operands", "runs as", "rule", "weight or reason"]
        rows = [_row(record) for record in self]
        if any(record.kernels for record in self):
            headers.insert(3, "kernel")
            for record, row in zip(self, rows, strict=True):
                row.insert(3, shown(record.kernels) if record.kernels else "")
        if sizes is not None:
            headers.append("bytes")
            for record, row in zip(self, rows, strict=True):
                own = [sizes[path] for path in record.paths if path in sizes]
                before, after = (
                    (sum(column) for column in zip(*own, strict=True)) if own else (0, 0)
                )
                row.append(f"{before:,} -> {after:,}" if own and record.quantized else "")
        if fold:
            rows = fold_rows(rows, (0, headers.index("weight or reason")))
        count = sum(record.quantized for record in self)
        listed = show_table(rows, headers)
        total = sum(not record.is_in_parts for record in self)
        return f"{listed}\n{count} of {total} operations quantized"

    def __str__(self) -> str:
        return self.table()


def _row(record: OpRecord) -> list[str]:
    return [
        record.op_id,
        " x ".join(record.operands),
        _runs_as(record),
        "" if record.rule is None else str(record.rule),
        record.reason or joined(record.paths),
    ]


def _runs_as(record: OpRecord) -> str:
    qtypes = [qtype or "float" for qtype in record.qtypes] if record.quantized else ["float"]
    if record.chained_to is not None:
        qtypes[0] += " given"
    return " x ".join(qtypes) + ("" if record.adapter is None else f" + {record.adapter}")


def check_misfit(record: OpRecord, problem: Fact | None) -> None:
    """Raise QuantizationError if the tiles of an operation's parameter don't fit."""
    if problem is not None and problem.code is Code.UNFIT:
        raise QuantizationError(
            f"Rule {record.rule} can't be followed for {joined(record.paths) or 'a parameter'}, an "
            f"operand of {record.op_id}: {problem}."
        )


_Formats = tuple[str, ...]

_OF_SIZES = (Code.MISFIT, Code.BLOCK_MISFIT, Code.NO_TILES, Code.NO_BLOCKS_HERE)
"""Why an operation stays float that other sizes would let a rule quantize."""


_Decision = tuple[int | None, _Formats] | None
"""The rule of an operation and the formats of its operands; None where it stays float."""


class _Uses(NamedTuple):
    """What a plan decided about the operations of a parameter that it quantizes.

    Attributes:
        decided: the decisions.
        shown: the first operation that is quantized, for messages.
    """

    decided: frozenset[_Decision]
    shown: OpRecord


class Decided:
    """What a plan decided about its operations.

    Args:
        ops: the operations.
        names_operations: whether rules name operations, so that those that consist of others are
            decided in their parts.

    Attributes:
        products: by the number of a rule, the first product of activations that it quantizes.
        chained: the ids of those that read int8 results of the one before.
    """

    def __init__(self, ops: Iterable[OpRecord], names_operations: bool):
        ops = tuple(ops)
        self.products: dict[int, str] = {}
        self.chained = frozenset(op.op_id for op in ops if op.chained_to is not None)
        self._by_id: dict[str, list[OpRecord]] = {}
        by_path: dict[str, list[OpRecord]] = {}
        for op in ops:
            self._by_id.setdefault(op.op_id, []).append(op)
            if op.quantized and not op.paths and op.op_name != "take" and op.rule is not None:
                self.products.setdefault(op.rule, op.op_id)
            # What computes a weight reads no stored one, and a lookup reads rows as they are.
            is_other = op.op_name == "take" or (op.why and op.why.code is Code.COMPUTES_WEIGHT)
            if not is_other and not (names_operations and op.is_in_parts):
                for path in op.paths:
                    by_path.setdefault(path, []).append(op)
        self._uses: dict[str, _Uses] = {}
        for path, found in by_path.items():
            if (shown := next((op for op in found if op.quantized), None)) is not None:
                self._uses[path] = _Uses(frozenset(map(_decision, found)), shown)

    def key(self, path: str) -> Hashable:
        """Return a key of a parameter; equal keys mean that its operations are decided alike."""
        found = self._uses.get(path)
        return None if found is None else found.decided

    def check(
        self,
        call: OpCall,
        paths: Collection[str],
        index: int | None,
        hows: Sequence[qn.HowToQuantize | None],
        why: Fact | None,
        is_linear: bool = False,
    ) -> None:
        """Raise QuantizationError unless the plan decided so about an operation's parameters.

        ``why`` says why it stays float; ``is_linear``, that JAX transposes it, so that its
        activations do.
        """
        known = [self._uses[path] for path in paths if path in self._uses]
        if not known:
            if not paths and why is not None and why.code in _OF_SIZES:
                self._check_sizes(call, hows, index, why)
            return
        decided = {one for uses in known for one in uses.decided}
        if is_linear:  # as a derivative of what is quantized
            is_same = any(one is not None and one[0] == index for one in decided)
        else:
            if len(decided) > 1:  # only its id tells which of them is meant
                own = (op for op in self._by_id.get(call.op_id, ()) if {*op.paths} & {*paths})
                decided = set(map(_decision, own))
            formats = _formats(None if how is None else how.qtype for how in hows)
            is_same = (None if why is not None else (index, formats)) in decided
        if not is_same:
            several = not is_linear and any(len(uses.decided) > 1 for uses in known)
            raise _differs(call, known[0].shown, hows, index, why, several)

    def _check_sizes(self, call: OpCall, hows: Sequence[Any], index: int | None, why: Fact) -> None:
        """Raise QuantizationError if a product of activations is quantized in the plan."""
        found = self._by_id.get(call.op_id, ())
        if found and all(op.quantized for op in found):
            raise _differs(call, found[0], hows, index, why)

    def check_range(
        self,
        call: OpCall,
        contraction: Contraction,
        ndims: tuple[int, ...],
        paths: Collection[str],
    ) -> None:
        """Raise QuantizationError if an id is that of another operation in the plan.

        The ranges that are stored under it are then those of other activations.
        """
        found = self._by_id.get(call.op_id)
        if not found:  # there are no statistics for it, which is another error
            return
        subject = subject_of(contraction, ndims)
        for op in found:
            is_alike = op.subject is None or op.subject[0] != subject[0] or op.subject == subject
            if set(op.paths) == set(paths) and is_alike:
                return
        planned = joined(found[0].paths) or "two activations"
        raise QuantizationError(
            f"{call.op_id} must be the operation that the plan has a static range for, of "
            f"{planned}, got another one, of {joined(paths) or 'two activations'}: operations that "
            "share a module path and a name are numbered in their order. Make a plan for this "
            "function and calibrate with it, or give the operations name scopes."
        )


def subject_of(contraction: Contraction, ndims: tuple[int, ...]) -> tuple[Hashable, Hashable]:
    """Return the axes of operands, and how a contraction takes them, whatever their sizes."""
    if isinstance(contraction, Matmul):
        how: Hashable = contraction.dims
    elif isinstance(contraction, Convolution | RaggedMatmul):
        how = contraction.numbers
    else:
        how = None
    return ndims, (type(contraction), how)


def _decision(op: OpRecord) -> _Decision:
    return (op.rule, _formats(op.qtypes)) if op.quantized else None


def _formats(qtypes: Iterable[str | None]) -> _Formats:
    """Return the formats of both operands; another program may have them on the other side."""
    return tuple(sorted(qtype or "float" for qtype in qtypes))


def _differs(
    call: OpCall,
    planned: OpRecord,
    hows: Sequence[qn.HowToQuantize | None],
    index: int | None,
    why: Fact | None,
    several: bool = False,
) -> QuantizationError:
    """Return the error of an operation that is decided otherwise than in the plan."""
    shown = " x ".join(qtype or "float" for qtype in planned.qtypes)
    if why is not None:
        here = f"float: {why}"
    else:
        here = " x ".join("float" if how is None else how.qtype for how in hows)
        here += f" by rule {index}"
    what = f"use {joined(planned.paths)}" if planned.paths else "run"
    if several:
        here += ", and the plan, which has several ways, has no such operation of this id"
    return QuantizationError(
        f"{call.op_id} must {what} as the plan does, {shown} by rule "
        f"{planned.rule} ({planned.op_id}), got {here}. Make a plan for this function and these "
        "shapes: provider.plan(fn, params, ...). Or give its operations the names and module paths "
        "that the rules have."
    )
