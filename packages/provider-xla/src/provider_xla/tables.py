"""What is printed: tables, and rows of equal layers folded."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

_PAST_HEADER = 2
"""Spaces by which a column is wider than its header."""


def table(
    rows: Sequence[Sequence[str]], headers: Sequence[str], right: Collection[int] = ()
) -> str:
    """Return rows of text under headers and a rule; the columns in ``right`` are right-aligned."""
    columns = list(zip(*rows, strict=True)) if rows else [()] * len(headers)
    widths = [
        max([len(header) + _PAST_HEADER, *map(len, cells)])
        for header, cells in zip(headers, columns, strict=True)
    ]

    def line(cells: Sequence[str]) -> str:
        pairs = enumerate(zip(cells, widths, strict=True))
        found = (cell.rjust(n) if i in right else cell.ljust(n) for i, (cell, n) in pairs)
        return "  ".join(found).rstrip()

    return "\n".join([line(headers), "  ".join("-" * n for n in widths), *map(line, rows)])


LEAST = 60
"""Rows that a table may have before equal ones are folded."""

_LINES = 20
"""Lines that a text may have before equal ones are folded."""

_NUMBER = re.compile(r"\d+")
_SHOWN = 4


class Fold(NamedTuple):
    """Rows whose names differ only in numbers.

    Attributes:
        rows: their places in the table, in order.
        texts: each column that may differ, with the numbers of all rows.
    """

    rows: tuple[int, ...]
    texts: tuple[str, ...]


def folded(
    names: Sequence[Sequence[str]], same: Callable[[int], object] = lambda row: None
) -> list[Fold]:
    """Return a table's rows, merging those that differ only in numbers.

    Args:
        names: of each row the columns in which numbers may differ.
        same: tells what else rows must have in common, by place; hashable.

    Returns:
        The folds, in the order of their first rows.
    """
    found: dict[object, list[int]] = {}
    for row, columns in enumerate(names):
        words = tuple(_NUMBER.sub("#", column) for column in columns)
        found.setdefault((words, same(row)), []).append(row)
    return [Fold(tuple(rows), _joined([names[row] for row in rows])) for rows in found.values()]


def fold_rows(rows: Sequence[Sequence[str]], names: Sequence[int]) -> list[list[str]]:
    """Return the rows of a table, folded if there are many.

    Args:
        rows: of text.
        names: the columns in which numbers may differ; the others must be equal.
    """
    if len(rows) <= LEAST:
        return [list(row) for row in rows]

    def others(place: int) -> object:
        return tuple(text for i, text in enumerate(rows[place]) if i not in names)

    found = []
    for one in folded([[row[i] for i in names] for row in rows], others):
        row = list(rows[one.rows[0]])
        for i, text in zip(names, one.texts, strict=True):
            row[i] = text
        found.append(row)
    return found


def fold_lines(lines: Sequence[str]) -> list[str]:
    """Return lines, merging many that differ only in numbers."""
    if len(lines) <= _LINES:
        return list(lines)
    return [
        one.texts[0] if len(one.rows) == 1 else f"{one.texts[0]} ({len(one.rows)} times)"
        for one in folded([(line,) for line in lines])
    ]


def _joined(names: Sequence[Sequence[str]]) -> tuple[str, ...]:
    """Return columns in which differing numbers list all their values."""
    return tuple(_column(values) for values in zip(*names, strict=True))


def _column(values: Sequence[str]) -> str:
    numbers = zip(*(_NUMBER.findall(value) for value in values), strict=True)
    shown = iter([_numbers(list(dict.fromkeys(column))) for column in numbers])
    text = _NUMBER.sub(lambda found: next(shown), values[0])
    return text.replace("[[", "[").replace("]]", "]")  # an index has brackets


def _numbers(given: Sequence[str]) -> str:
    """Return numbers as ``[0-79]``, ``[0-158:2]`` in steps of two, or ``[1,2,4,...]``."""
    if len(given) == 1:
        return given[0]
    numbers = sorted(map(int, given))
    step = numbers[1] - numbers[0]  # 0 of 1 and 01
    if step and numbers == list(range(numbers[0], numbers[-1] + 1, step)):
        return f"[{numbers[0]}-{numbers[-1]}{f':{step}' if step > 1 else ''}]"
    first = ",".join(map(str, numbers[:_SHOWN]))
    return f"[{first},...,{numbers[-1]}]" if len(numbers) > _SHOWN else f"[{first}]"
