"""Equal layers' operations in one row, where there are many."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from provider_xla.features import LEAST, folded, joined

from .results import Error, FloatOp, OpQuality, ParameterQuality


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


class SizeRow(NamedTuple):
    """A row of parameters that are quantized.

    Attributes:
        name: their name.
        first: the first of them.
        count: how many share the row.
        before: bytes of all of them in float.
        after: bytes of all of them as stored.
    """

    name: str
    first: ParameterQuality
    count: int
    before: int
    after: int


class NameRow(NamedTuple):
    """A row of what stays float.

    Attributes:
        name: name of the operation or parameter.
        weight: the parameters that the operation uses, or "".
        first: the first operation or parameter of the row.
        count: how many share the row.
    """

    name: str
    weight: str
    first: FloatOp | ParameterQuality
    count: int


def op_rows(
    ops: Sequence[OpQuality], parameters: Sequence[ParameterQuality], most: int | None = LEAST
) -> list[OpRow]:
    """Return operations' rows, folded if they are more than ``most``; None folds none."""
    sizes = {one.path: (one.bytes_before, one.bytes_after) for one in parameters}
    if most is None or len(ops) <= most:
        return [OpRow(op, (op,), _size([op], sizes)) for op in ops]

    def same(place: int) -> object:
        op = ops[place]
        return op.operands, op.qtypes, op.rule, op.kernel, op.kernel_reason, len(op.paths)

    rows = []
    for one in folded([(op.op_id, joined(op.paths)) for op in ops], same):
        members = tuple(ops[place] for place in one.rows)
        rows.append(OpRow(_together(members, *one.texts), members, _size(members, sizes)))
    return rows


def _size(ops: Sequence[OpQuality], sizes: Mapping[str, tuple[int, int]]) -> tuple[int, int] | None:
    """Return the bytes of operations' parameters before and after, each once."""
    paths = dict.fromkeys(path for op in ops for path in op.paths)
    found = [sizes[path] for path in paths if path in sizes]
    return (sum(pair[0] for pair in found), sum(pair[1] for pair in found)) if found else None


def float_rows(ops: Sequence[FloatOp]) -> list[NameRow]:
    """Return the rows of operations that stay float for one reason."""
    names = [(op.op_id, joined(op.paths)) for op in ops]
    if len(ops) <= LEAST:
        return [NameRow(*name, op, 1) for name, op in zip(names, ops, strict=True)]
    found = folded(names, lambda place: (ops[place].operands, ops[place].kernel, ops[place].flops))
    return [NameRow(one.texts[0], one.texts[1], ops[one.rows[0]], len(one.rows)) for one in found]


def parameter_rows(parameters: Sequence[ParameterQuality]) -> list[NameRow]:
    """Return the rows of parameters that stay as they are."""
    names = [(one.path,) for one in parameters]
    if len(parameters) <= LEAST:
        return [NameRow(one.path, "", one, 1) for one in parameters]
    found = folded(names, lambda place: (parameters[place].dtype, parameters[place].shape))
    return [NameRow(one.texts[0], "", parameters[one.rows[0]], len(one.rows)) for one in found]


def size_rows(parameters: Sequence[ParameterQuality], most: int) -> list[SizeRow]:
    """Return the rows of parameters' bytes, folded if they are more than ``most``."""

    def same(place: int) -> object:
        one = parameters[place]
        return one.dtype, one.shape, one.qtype

    names = [(one.path,) for one in parameters]
    rows = []
    for fold in folded(names, same if len(parameters) > most else lambda place: place):
        members = [parameters[place] for place in fold.rows]
        before, after = (sum(sizes) for sizes in zip(
            *((one.bytes_before, one.bytes_after) for one in members), strict=True
        ))  # fmt: skip
        rows.append(SizeRow(fold.texts[0], members[0], len(members), before, after))
    return rows


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
