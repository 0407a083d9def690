"""``jaxtap trace``: print the operations of a function in a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from interception_core import JaxtapError
from interception_core.cli import find_function, read_argument


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``jaxtap trace``."""
    parser.add_argument("function", metavar="FILE:FUNCTION", help="such as model.py:forward")
    parser.add_argument(
        "args",
        nargs="*",
        metavar="ARG",
        help="its arguments: types such as 'f32[8,64]', or expressions of names in FILE such as "
        "'params'",
    )
    parser.add_argument(
        "--tap",
        action="append",
        metavar="TARGET",
        help="list only this target ('jax.numpy.dot', 'primitive:dot_general'); may be repeated",
    )
    parser.add_argument(
        "--params",
        metavar="PATH",
        help="prefix of the parameters' paths ('args[0]'): also print how operands are computed "
        "from parameters, and list each call of a jitted function",
    )
    parser.add_argument(
        "--high", action="store_true", help="also list jaxprs with high-level types"
    )
    parser.add_argument("--json", action="store_true", help="print JSON instead of a table")


def run(args: argparse.Namespace) -> int:
    """Print the operations.

    Raises:
        JaxtapError: the file, the function or an argument can't be used, or the function can't
            be traced.
    """
    module, fn = find_function(args.function)
    values = tuple(read_argument(text, module) for text in args.args)

    from .operations import default_targets, high_jaxprs, operations

    targets = args.tap or default_targets({name.partition(".")[0] for name in sys.modules})
    try:
        found, jaxpr = operations(fn, values, targets, args.params)
    except JaxtapError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        raise JaxtapError(
            f"{args.function} must be traceable with the given arguments, got {reason} from "
            f"{len(values)} arguments. Give its arguments after it, as types ('f32[8,64]') or "
            "expressions of names in the file ('params')."
        ) from error
    high = high_jaxprs(jaxpr)
    if args.json:
        content: dict[str, Any] = {"operations": [asdict(operation) for operation in found]}
        if args.high:
            content["high_jaxprs"] = [{"jaxpr": name, "equations": n} for name, n in high]
        print(json.dumps(content, indent=2))
    else:
        print("\n".join(_table(found)))
        if args.high:
            print("\n" + ("\n".join(_high_lines(high)) if high else "No jaxpr is high."))
    return 0


def _table(found: list[Any]) -> Iterator[str]:
    from tabulate import tabulate

    rows = [
        [
            op.op_id,
            op.level,
            ", ".join(op.within),
            f"hi {op.hi_prim or ''}" if op.high else "",
            ", ".join(
                _operand(*known)
                for known in zip(op.operands, op.provenance, op.axes, op.computed, strict=True)
            ),
        ]
        for op in found
    ]
    yield tabulate(rows, ["operation", "level", "within", "", "operands"], disable_numparse=True)
    yield f"{len(found)} operations"


def _operand(shape: str, path: str | None, axes: tuple | None, computed: str | None) -> str:
    if path is not None:
        return f"{shape} = {path}{_moved(axes)}"
    return shape if computed is None else f"{shape} = {computed}"


def _moved(axes: tuple | None) -> str:
    """Describe where the input's axes are, if they have moved."""
    if axes is None or axes == tuple(range(len(axes))):
        return ""
    return f" axes {list(axes)}"


def _high_lines(high: list[tuple[str, int]]) -> Iterator[str]:
    yield "High jaxprs:"
    for name, equations in high:
        yield f"  {name}: {equations} equations"
