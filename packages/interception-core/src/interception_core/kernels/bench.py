"""Bench: the calls that a kernel is timed on, and tables.

A kernel's package names a function in ``KernelSpec.bench``, whose result ``jaxtap bench`` times.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from ..errors import JaxtapError

Side: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A function that `jax.jit` takes, and its operands."""


@dataclass(frozen=True)
class BenchCase:
    """One call that a kernel is timed on.

    Args:
        labels: distinguish this case from others, such as ``{"dtype": "float32", "rows": 8}``.
        make: returns a function that calls the op, and its operands. It is timed three times: with
            the kernel, with the kernel that this one displaces, and with the op's reference.
        others: other sides to time, by name: ``"float": lambda: (jnp.matmul, (x, w))``.
    """

    labels: Mapping[str, str | int]
    make: Callable[[], Side]
    others: Mapping[str, Callable[[], Side]] = field(default_factory=dict)


@dataclass(frozen=True)
class Bench:
    """The result of ``KernelSpec.bench``.

    Args:
        cases: the calls, made one after the other.
        against: the name of the side that the kernel must not be slower than: one of ``others``, or
            ``"reference"``.
        table: the package's file for the ratios, which ``supports`` reads with `slower_than`; None
            if there is none.
        variant: the property of the machine that the times hold for, such as the instruction set.
    """

    cases: Iterable[BenchCase]
    against: str = "reference"
    table: Path | None = None
    variant: str = "any"


def read_table(path: Path) -> dict[str, Any]:
    """Return a table: by target and variant, cases with their ratio.

    Args:
        path: the file. If it does not exist, the table is empty.

    Raises:
        JaxtapError: the file is not JSON.
    """
    if not path.exists():
        return {}
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise JaxtapError(
            f"{path} must be JSON, got {error}. Write it again with jaxtap bench --write."
        ) from error


def write_table(
    path: Path, target: str, variant: str, cases: Iterable[Mapping[str, str | int | float]]
) -> None:
    """Put cases into a table, replacing those with the same labels.

    Args:
        variant: see ``Bench.variant``.
        cases: the labels of each case, and ``ratio``: the kernel's time divided by that of
            ``Bench.against``.
    """

    def labels(case: Mapping[str, Any]) -> tuple[Any, ...]:
        return tuple((name, case[name]) for name in sorted(case) if name != "ratio")

    table = read_table(path)
    kept = table.setdefault(target, {}).setdefault(variant, [])
    found = {labels(case): dict(case) for case in (*kept, *cases)}
    table[target][variant] = list(found.values())
    lines = []
    for name, variants in sorted(table.items()):
        inner = []
        for one, rows in sorted(variants.items()):
            rows = ",\n".join(f"   {json.dumps(row)}" for row in rows)
            inner.append(f"  {json.dumps(one)}: [\n{rows}\n  ]")
        lines.append(f" {json.dumps(name)}: {{\n" + ",\n".join(inner) + "\n }")
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def slower_than(
    cases: Iterable[Mapping[str, Any]],
    along: str,
    at: int,
    *,
    same: Mapping[str, str | int],
    near: Mapping[str, int],
    margin: float = 0.05,
) -> str | None:
    """Return where a kernel was measured to be slower, or None.

    Of the cases with the call's labels, those with the nearest sizes decide. A case holds for its
    value of ``along`` and larger ones, up to the next case. The first also holds for smaller ones.

    Args:
        cases: the cases of a kernel and variant, from a table.
        along: the label that the answer depends on, such as ``"rows"``.
        at: the call's value of that label.
        same: labels whose values must be those of the call.
        near: labels that are sizes, with the call's values.
        margin: by how much, as a fraction, a kernel may seem slower: times are noisy.

    Returns:
        The range and the sizes, in a few words; None if the kernel is not slower.
    """
    fit = [case for case in cases if all(case[name] == value for name, value in same.items())]
    if not fit:
        return None

    def far(case: Mapping[str, Any]) -> float:
        return sum(abs(math.log2(max(case[name], 1) / max(size, 1))) for name, size in near.items())

    nearest = min(map(far, fit))
    row = sorted((case for case in fit if far(case) == nearest), key=lambda case: case[along])
    lost = [case["ratio"] > 1 + margin for case in row]
    place = max((i for i, case in enumerate(row) if case[along] <= at), default=0)
    if not lost[place]:
        return None
    begin = place
    while begin > 0 and lost[begin - 1]:
        begin -= 1
    end = next((row[i][along] for i in range(place, len(row)) if not lost[i]), None)
    start = row[begin][along] if begin else 1
    span = f"from {start} {along} on" if end is None else f"with {start} to {end - 1} {along}"
    sizes = ", ".join(f"{name}={row[0][name]}" for name in near)
    return f"{span} (measured with {sizes})" if sizes else f"{span} (measured)"
