"""The shell of a demo: options, checks, tables, a JSON file."""

from __future__ import annotations

import argparse
import importlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import JaxtapError


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options that all demos have."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results to FILE")
    parser.add_argument(
        "--engine", choices=["trace", "patch"], help="what taps the model (default: the best)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the data and the training")


def ready(args: argparse.Namespace, install: str) -> None:
    """Raise before the work if the demo would fail later.

    Args:
        install: what to install for the libraries of the demo, such as ``"jaxtap[xla]"``.

    Raises:
        JaxtapError: a library is missing, or there is nowhere to write to.
    """
    for module in ("optax", "sklearn", "tabulate", "tqdm"):
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise JaxtapError(f"The demo needs {error.name}. Install {install}.") from error
    if args.json is not None and not args.json.parent.is_dir():
        raise JaxtapError(
            f"--json must be in a folder that exists, got {args.json}. Make the folder "
            f"{args.json.parent}."
        )


@contextmanager
def progress(steps: int, label: str, unit: str = "epoch") -> Iterator[Any]:
    """Show a progress bar. Yield the function that advances it."""
    from tqdm import tqdm

    with tqdm(total=steps, desc=label, unit=unit, disable=None) as bar:
        yield bar.update


def print_table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table whose columns but the first are numbers."""
    from tabulate import tabulate

    align = ("left", *["right"] * (len(headers) - 1))
    print(tabulate(rows, headers, disable_numparse=True, colalign=align))


def write_json(path: Path | None, value: Any) -> None:
    """Write results to a file, if one is given."""
    if path is None:
        return
    # A temporary name first, so that ``path`` is whole or not there.
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(json.dumps(value, indent=2) + "\n")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
    print(f"Wrote {path}.")
