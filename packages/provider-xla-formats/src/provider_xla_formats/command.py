"""``jaxtap quantize``: the float parameters in a file, by the plan of a function in another."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from interception_core import JaxtapError
from provider_xla.cli import configure, make_plan, told

if TYPE_CHECKING:
    from .float_files import Source

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
    from provider_xla.file_formats import require_extra

    require_extra("msgspec", "safetensors")
    from .quantize_files import quantize_file

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
        quantize_file(plan, args.source, out, names=_narrowed, overwrite=args.overwrite)
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


def _narrowed(name: str) -> Source:
    """Return the tensor of a parameter as JAX takes it.

    It has no 64 bits where x64 is off, and whoever has only a shell can neither switch that on nor
    convert a file.
    """
    import jax

    from .float_files import Source

    def narrow(array: np.ndarray) -> np.ndarray:
        found = array.astype(jax.dtypes.canonicalize_dtype(array.dtype), copy=False)
        # Integers that do not fit would wrap around: reading them is an error then.
        is_cut = array.dtype.kind in "iu" and (found != array).any()
        return array if is_cut else found

    return Source(name, transform=narrow)


def read_types(source: Any) -> Any:
    """Return the types of a file's tensors, nested by the dots in their names.

    Raises:
        JaxtapError: the file can't be read, or a name is another's and a part of it.
    """
    from .float_files import TensorFiles

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
