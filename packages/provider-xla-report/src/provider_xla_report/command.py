"""``jaxtap report``: what quantization costs a function in a file."""

from __future__ import annotations

import argparse
import json
import warnings
from pathlib import Path
from typing import Any

from interception_core import JaxtapError
from provider_xla import QuantizationWarning
from provider_xla.cli import (
    check_folders,
    check_has,
    configure,
    make_plan,
    told,
    write_whole,
    written,
)

ORDERS = ("program", "sqnr", "error", "flops", "time", "bytes")
"""How operations can be sorted; here, where nothing imports jax."""


def configure_report(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``jaxtap report``."""
    configure(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots to FILE")
    parser.add_argument(
        "--json", metavar="FILE", help="also write the report to FILE; - prints it instead"
    )
    parser.add_argument("--sort", choices=ORDERS, default="program", help="order of the operations")
    parser.add_argument("--top", type=_positive, metavar="N", help="print only the first N of them")
    parser.add_argument("--title", help="of the page (default: FILE:FUNCTION)")
    parser.add_argument("--no-time", action="store_true", help="time nothing")


def run_report(args: argparse.Namespace) -> int:
    """Measure and print a report."""
    check_folders(args.html, args.json)
    plan, params, batch = make_plan(args)
    with told(f"{args.function} can't be measured"):
        import jax

        from provider_xla import Plan

        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((params, batch))):
            raise JaxtapError(
                "A report runs the function: its arguments must have values. Write expressions on "
                f"what the file defines, such as 'params', not types. Got {args.args}."
            )
        check_has(plan, "report", "jaxtap report")
        if not isinstance(plan, Plan):
            return _of_another(args, plan, params, batch)
        with warnings.catch_warnings(record=True) as notes:
            warnings.simplefilter("always", QuantizationWarning)
            statistics = plan.calibrate(params, [batch]) if plan.ranges else None
        report = plan.report(params, *batch, statistics=statistics, time=not args.no_time)
    if args.json == "-":
        print(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        print(report.text(args.sort, args.top))
        for note in notes:
            print(f"note: {note.message}")
        if args.json is not None:
            written(args.json, report.save_json)
    if args.html is not None:
        title = (
            args.title
            or f"{Path(args.function.rpartition(':')[0]).name}:"
            + (args.function.rpartition(":")[2])
        )
        written(args.html, lambda path: report.save_html(path, title), quiet=args.json == "-")
    return 0


def _of_another(args: argparse.Namespace, plan: Any, params: Any, batch: tuple[Any, ...]) -> int:
    """Print the report that another provider's plan makes, and write its JSON."""
    given = {
        "--html": args.html,
        "--sort": args.sort != "program",
        "--top": args.top,
        "--title": args.title,
        "--no-time": args.no_time,
    }
    if wrong := [name for name, value in given.items() if value]:
        raise JaxtapError(
            f"{' and '.join(wrong)} must be left out with a {type(plan).__name__}: only reports of "
            "provider-xla take them."
        )
    report = plan.report(params, *batch)
    text = ""
    if args.json is not None:
        check_has(report, "as_json", "--json")
        text = json.dumps(report.as_json(), indent=2, allow_nan=False)
    print(text if args.json == "-" else report)
    if args.json not in (None, "-"):
        written(args.json, lambda path: write_whole(path, text + "\n"))
    return 0


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value
