"""``jaxtap plan``, ``explain``, ``presets``, ``quantize``: rules for a function in a file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from interception_core import JaxtapError

from ..extras import require
from .options import check_folders, check_has, configure, make_plan, told, write_whole, written


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


_DESCRIPTION = """
FUNCTION is the function that uses the parameters of SOURCE, and each ARG one of its other
arguments: a type such as 'f32[8,64]', or an expression on what FILE defines. The parameters are
nested by the dots in the names of SOURCE's tensors, and where all names of a level are numbers from
0 on, they are a list. Without any ARG, FUNCTION is called and returns (function, parameters, *other
arguments), or (model, *inputs) for a model object: types are enough.
"""


def configure_quantize(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``jaxtap quantize``."""
    files = {
        "source": "the float parameters: a safetensors file, its index, or a folder with one",
        "out": "where to save the quantized ones: a .safetensors file, or a folder for orbax",
    }
    configure(parser, _DESCRIPTION, files)
    parser.add_argument("--overwrite", action="store_true", help="replace OUT if it is there")
    parser.add_argument("--json", action="store_true", help="print JSON instead of lines")


def run_quantize(args: argparse.Namespace) -> int:
    """Quantize a file."""
    require("msgspec", "safetensors")
    from ..store.quantize_file import quantize_file

    out = Path(args.out)
    if out.exists() and not args.overwrite:
        raise JaxtapError(f"OUT must not exist, got {out}. Add --overwrite to replace it.")
    if not out.absolute().parent.is_dir():
        raise JaxtapError(
            f"OUT must be in a folder that exists, got {out}. Make the folder {out.parent}."
        )
    params = read_types(args.source) if args.args else None
    plan, _, _ = make_plan(args, params)
    if ranges := getattr(plan, "ranges", ()):
        raise JaxtapError(
            f"The rules must find ranges as the program runs, got static ones for {len(ranges)} "
            "activations. Measure them in Python: plan.calibrate(params, batches)."
        )
    if not args.json:
        print(str(plan).partition("\n")[0], flush=True)
    with told(f"{args.source} can't be quantized"):
        quantize_file(plan, args.source, out, overwrite=args.overwrite)
    if args.json:
        found = {
            "out": str(out),
            "weights": len(plan.weights),
            "parameters": len(plan.leaves),
            "bytes_before": plan.bytes_before,
            "bytes_after": plan.bytes_after,
            "problems": list(plan.problems),
        }
        print(json.dumps(found, indent=2))
        return 0
    for problem in plan.problems:
        print(f"problem: {problem}")
    print(f"Wrote {out}.")
    return 0


def read_types(source: Any) -> Any:
    """Return the types of a file's tensors, nested by the dots in their names.

    Raises:
        JaxtapError: the file can't be read, or a name is another's and a part of it.
    """
    from ..store.float_files import TensorFiles

    tree: dict[str, Any] = {}
    for name, kind in TensorFiles(source).types().items():
        *outer, last = name.split(".")
        node: Any = tree
        for part in outer:
            node = node.setdefault(part, {}) if isinstance(node, dict) else node
        if not isinstance(node, dict) or last in node:
            raise JaxtapError(
                f"The names of SOURCE's tensors must nest by their dots, got {name} beside a "
                "tensor with a part of that name. Leave out the ARGs, and name a function that "
                "returns (function, parameters, *other arguments)."
            )
        node[last] = kind
    return _lists(tree)


def _lists(node: Any) -> Any:
    """Return a tree with lists for dicts whose keys are 0, 1 and so on."""
    if not isinstance(node, Mapping):
        return node
    found = {key: _lists(child) for key, child in node.items()}
    numbers = [str(i) for i in range(len(found))]
    return [found[key] for key in numbers] if found.keys() == set(numbers) else found
