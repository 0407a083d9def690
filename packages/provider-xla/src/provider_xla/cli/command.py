"""``jaxtap plan``, ``explain``, ``presets``: rules for a function in a file."""

from __future__ import annotations

import argparse
import json

from . import check_folders, check_has, configure, make_plan, told, write_whole, written


def configure_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``jaxtap plan``."""
    configure(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="also write the plan to FILE; - prints it instead"
    )


def configure_explain(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``jaxtap explain``."""
    configure(parser)
    parser.add_argument(
        "--name", required=True, help="the id of an operation, or the path of a parameter"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run_explain(args: argparse.Namespace) -> int:
    """Print why an operation or a parameter is quantized as it is."""
    plan, _, _ = make_plan(args)
    check_has(plan, "explain", "jaxtap explain")
    with told(f"{args.name} can't be explained"):
        text = plan.explain(args.name)
    found = {"name": args.name, "lines": text.splitlines()}
    print(json.dumps(found, indent=2) if args.json else text)
    return 0


def configure_presets(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``jaxtap presets``."""
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run_presets(args: argparse.Namespace) -> int:
    """Print what each preset does, its bytes and its kernel here."""
    from ..providers.given import presets

    found = presets()
    print(json.dumps([one._asdict() for one in found], indent=2) if args.json else found)
    return 0


def run_plan(args: argparse.Namespace) -> int:
    """Print a plan."""
    check_folders(args.json)
    plan, _, _ = make_plan(args)
    text = ""
    if args.json is not None:
        check_has(plan, "as_json", "--json")
        text = json.dumps(plan.as_json(), indent=2, allow_nan=False)
    if args.json == "-":
        print(text)
        return 0
    print(plan)
    for problem in plan.problems:
        print(f"problem: {problem}")
    if args.json is not None:
        written(args.json, lambda path: write_whole(path, text + "\n"))
    return 0
