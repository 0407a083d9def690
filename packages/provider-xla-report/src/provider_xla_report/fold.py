"""Equal layers' operations in one row, where there are many."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from provider_xla.features import LEAST, folded, joined

from .results import Error, FloatOp, OpQuality, ParameterQuality

T = TypeVar("T")


class OpRow(NamedTuple):
    """A row of quantized operations.

    Attributes:
        op: the operation; of several, their common name, the largest error, and sums of the rest.
        members: the operations, in the program's order.
        size: bytes of their parameters before and after; None if they have no parameters.
    """

    op: OpQuality
    members: tuple[OpQuality, ...]
    size: tuple[int, int] | None


@dataclasses.dataclass(frozen=True)
class Row:
    """Operations that stay float, or parameters, in one row.

    Attributes:
        name: their name.
        weight: the parameters that the operations use, or "".
        members: they.
    """

    name: str
    weight: str
    members: tuple[Any, ...]

    @property
    def first(self) -> Any:
        """The first of them."""
        return self.members[0]

    @property
    def count(self) -> int:
        """How many they are."""
        return len(self.members)

    def bytes(self, of: str) -> int:
        """Return the bytes of all: their field of that name."""
        return sum(getattr(one, of) for one in self.members)


def op_rows(
    ops: Sequence[OpQuality], parameters: Sequence[ParameterQuality], most: int | None = LEAST
) -> list[OpRow]:
    """Return operations' rows, folded if they are more than ``most``; None folds none."""
    sizes = {one.path: (one.bytes_before, one.bytes_after) for one in parameters}

    def same(op: OpQuality) -> object:
        return op.operands, op.qtypes, op.rule, op.kernel, op.kernel_reason, len(op.paths)

    names = [(op.op_id, joined(op.paths)) for op in ops]
    rows = _rows(ops, names, same, len(ops) if most is None else most)
    return [
        OpRow(_together(row.members, row.name, row.weight), row.members, _size(row.members, sizes))
        for row in rows
    ]


def _size(ops: Sequence[OpQuality], sizes: Mapping[str, tuple[int, int]]) -> tuple[int, int] | None:
    """Return the bytes of operations' parameters before and after, each once."""
    paths = dict.fromkeys(path for op in ops for path in op.paths)
    found = [sizes[path] for path in paths if path in sizes]
    return (sum(pair[0] for pair in found), sum(pair[1] for pair in found)) if found else None


def float_rows(ops: Sequence[FloatOp]) -> list[Row]:
    """Return the rows of operations that stay float for one reason."""
    names = [(op.op_id, joined(op.paths)) for op in ops]
    return _rows(ops, names, lambda op: (op.operands, op.kernel, op.flops))


def parameter_rows(parameters: Sequence[ParameterQuality], most: int = LEAST) -> list[Row]:
    """Return the rows of parameters."""
    names = [(one.path, "") for one in parameters]
    return _rows(parameters, names, lambda one: (one.dtype, one.shape, one.qtype), most)


def _rows(
    given: Sequence[T],
    names: Sequence[tuple[str, str]],
    same: Callable[[T], object],
    most: int = LEAST,
) -> list[Row]:
    """Return rows, folded where they are more than ``most`` and ``same``."""
    if len(given) <= most:
        return [Row(*name, (one,)) for name, one in zip(names, given, strict=True)]
    found = folded(names, lambda place: same(given[place]))
    return [Row(one.texts[0], one.texts[1], tuple(given[i] for i in one.rows)) for one in found]


def _together(members: Sequence[OpQuality], op_id: str, weight: str) -> OpQuality:
    """Return several operations as one."""
    if len(members) == 1:
        return members[0]
    ratios = [op.error.sqnr_db for op in members if op.error.sqnr_db is not None]
    errors = [op.error.max_abs_error for op in members if op.error.max_abs_error is not None]
    return dataclasses.replace(
        members[0],
        op_id=op_id,
        paths=(weight,) if weight else (),
        calls=sum(op.calls for op in members),
        error=Error(min(ratios, default=None), max(errors, default=None)),
        steps=(),
        flops=sum(op.flops for op in members),
        float_seconds=_sum([op.float_seconds for op in members]),
        seconds=_sum([op.seconds for op in members]),
        share=_sum([op.share for op in members]),
        ranges=members[0].ranges if len({op.ranges for op in members}) == 1 else (None, None),
    )


def _sum(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) if len(known) == len(values) else None
