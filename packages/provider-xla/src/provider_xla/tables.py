"""Tables of text, and bars of progress, where tqdm is installed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any, Generic, Self, TypeVar

T = TypeVar("T")
_PAST_HEADER = 2
"""Spaces by which a column is wider than its header."""


def table(
    rows: Sequence[Sequence[str]], headers: Sequence[str], right: Collection[int] = ()
) -> str:
    """Return rows of text under their headers and a rule.

    Args:
        rows: cells of one line each.
        headers: of the columns.
        right: the columns that are aligned to the right; the others are to the left.
    """
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


class _NoBar(Generic[T]):
    """What is used of a bar, without one."""

    def __init__(self, steps: Iterable[T] | None):
        self._steps = steps

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        return None

    def __iter__(self) -> Iterator[T]:
        return iter(self._steps or ())

    def update(self, count: int = 1) -> None:
        """Show nothing."""


def progress(steps: Iterable[T] | None = None, **how: Any) -> Any:
    """Return a bar of progress on terminals, by tqdm if it is installed; else one without a bar.

    Args:
        steps: what is iterated over; None where steps are told by ``update``.
        how: as tqdm takes it.
    """
    try:
        from tqdm import tqdm
    except ModuleNotFoundError:
        return _NoBar(steps)
    return tqdm(steps, disable=None, **how)
