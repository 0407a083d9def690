"""``jaxtap plan`` and ``jaxtap report``: plans and reports of a function in a file."""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from interception_core import JaxtapError

from ..errors import QuantizationWarning
from ..report.quality import write
from ..report.results import ORDERS
from .options import configure, make_plan, told


def configure_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``jaxtap plan``."""
    configure(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="also write the plan to FILE; - prints it instead"
    )


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


def configure_explain(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``jaxtap explain``."""
    configure(parser)
    parser.add_argument(
        "--name", required=True, help="the id of an operation, or the path of a parameter"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run_explain(args: argparse.Namespace) -> int:
    """Print why an operation or a parameter is quantized as it is.

    Returns:
        0.

    Raises:
        JaxtapError: the file, the function, an argument or the rules can't be used; or nothing, or
            too much, has the name.
    """
    plan, _, _ = make_plan(args)
    _check_has(plan, "explain", "jaxtap explain")
    with told(f"{args.name} can't be explained"):
        text = plan.explain(args.name)
    found = {"name": args.name, "lines": text.splitlines()}
    print(json.dumps(found, indent=2) if args.json else text)
    return 0


def configure_presets(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``jaxtap presets``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_presets(args: argparse.Namespace) -> int:
    """Print what each preset does, its bytes and its kernel here.

    Returns:
        0.
    """
    from ..providers.given import presets

    found = presets()
    print(json.dumps([one._asdict() for one in found], indent=2) if args.json else found)
    return 0


def run_plan(args: argparse.Namespace) -> int:
    """Print a plan.

    Returns:
        0.

    Raises:
        JaxtapError: the file, the function, an argument or the rules can't be used.
    """
    _check_folders(args.json)
    plan, _, _ = make_plan(args)
    text = ""
    if args.json is not None:
        _check_has(plan, "as_json", "--json")
        text = json.dumps(plan.as_json(), indent=2, allow_nan=False)
    if args.json == "-":
        print(text)
        return 0
    print(plan)
    for problem in plan.problems:
        print(f"problem: {problem}")
    if args.json is not None:
        _written(args.json, lambda path: write(path, text + "\n"))
    return 0


def run_report(args: argparse.Namespace) -> int:
    """Measure and print a report.

    Returns:
        0.

    Raises:
        JaxtapError: the file, the function, an argument or the rules can't be used, or a library
            for the page is missing.
    """
    _check_folders(args.html, args.json)
    if args.html is not None:
        from ..report.quality import load_page

        load_page()  # before anything is measured
    plan, params, batch = make_plan(args)
    with told(f"{args.function} can't be measured"):
        import jax

        from ..plan.plan import Plan

        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((params, batch))):
            raise JaxtapError(
                "A report runs the function: its arguments must have values. Write expressions on "
                f"what the file defines, such as 'params', not types. Got {args.args}."
            )
        _check_has(plan, "report", "jaxtap report")
        if not isinstance(plan, Plan):
            return _report_of_another(args, plan, params, batch)
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
            _written(args.json, report.save_json)
    if args.html is not None:
        title = (
            args.title
            or f"{Path(args.function.rpartition(':')[0]).name}:"
            + (args.function.rpartition(":")[2])
        )
        _written(args.html, lambda path: report.save_html(path, title), quiet=args.json == "-")
    return 0


def _check_has(found: Any, name: str, what: str) -> None:
    """Raise JaxtapError where a provider's plan or report lacks an optional method."""
    if not hasattr(found, name):
        raise JaxtapError(
            f"{what} needs {name}(), got a {type(found).__name__} without. See "
            "interception_core.ProviderPlan."
        )


def _report_of_another(
    args: argparse.Namespace, plan: Any, params: Any, batch: tuple[Any, ...]
) -> int:
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
        _check_has(report, "as_json", "--json")
        text = json.dumps(report.as_json(), indent=2, allow_nan=False)
    print(text if args.json == "-" else report)
    if args.json not in (None, "-"):
        _written(args.json, lambda path: write(path, text + "\n"))
    return 0


def _check_folders(*paths: Any) -> None:
    """Raise JaxtapError where a file has no folder to be written into."""
    for path in paths:
        if path is not None and str(path) != "-" and not Path(path).parent.is_dir():
            raise JaxtapError(
                f"There is no folder {Path(path).parent} to write {Path(path).name} into."
            )


def _written(path: Any, save: Callable[[Any], None], quiet: bool = False) -> None:
    try:
        save(path)
    except OSError as error:
        raise JaxtapError(f"{path} can't be written: {error}") from error
    if not quiet:
        print(f"Wrote {path}.")


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be 1 or more, not {value}")
    return value
