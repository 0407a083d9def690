"""Losses of a training as text, as a table and as a page."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from interception_core import report_kit
from provider_xla.file_formats import atomic_write

TABLE, PAGE = "loss.csv", "loss.html"


def parts(curve: Sequence[float], most: int) -> list[tuple[int, int, float]]:
    """Return the first and the last step of each of at most so many parts, and the mean loss."""
    found, last = [], 0
    for part in np.array_split(curve, min(len(curve), most)):
        found.append((last + 1, last + len(part), float(part.mean())))
        last += len(part)
    return found


def show(curve: Sequence[float]) -> str:
    """Return lines of bars: the mean loss of up to ten parts of the training."""
    return "\n".join(
        f"  to step {last:5}  {loss:.3f}  {'#' * round(loss * 10)}"
        for _, last, loss in parts(curve, 10)
    )


def write(folder: Path, curve: Sequence[float], rates: Sequence[float]) -> None:
    """Write ``loss.csv``, of each step, and ``loss.html``, with bars of up to 40 parts.

    Args:
        folder: that they are put into; older ones are replaced.
        curve: nats a token, of each step.
        rates: of the optimizer.
    """
    text = io.StringIO()
    rows: list[Any] = [
        ("step", "loss", "rate"),
        *zip(range(1, len(curve) + 1), curve, rates, strict=True),
    ]
    csv.writer(text, lineterminator="\n").writerows(rows)
    bars = [
        report_kit.Row(
            f"step {last}",
            (report_kit.Bar(loss, report_kit.FIRST, f"{loss:.3f}"),),
            f"mean of steps {first} to {last}",
        )
        for first, last, loss in parts(curve, report_kit.SHOWN)
    ]
    page = report_kit.render(
        Path(__file__).with_name("loss.html.jinja"),
        title="Loss",
        steps=len(curve),
        first=f"{curve[0]:.3f}",
        last=f"{bars[-1].bars[0].text}",
        charts=report_kit.charts(bars, "Mean loss of the steps of a training, in nats a token"),
    )
    for name, content in ((TABLE, text.getvalue()), (PAGE, page)):
        with atomic_write(folder / name, overwrite=True) as new:
            new.write_text(content, encoding="utf-8")
