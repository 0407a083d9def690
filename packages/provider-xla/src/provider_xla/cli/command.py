"""``jaxtap plan`` and ``jaxtap report``: plans and reports of a function in a file."""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from interception_core import JaxtapError, Provider, get_provider
from interception_core.cli import find_function, read_argument

from ..report.quality import write
from ..report.results import ORDERS

_DESCRIPTION = """
FUNCTION is the function to quantize, and each ARG one of its arguments, the parameters first: an
expression on what FILE defines, or a type such as 'f32[8,64]'. Without any ARG, FUNCTION is called
and returns them all: (function, parameters, *other arguments).
"""


def configure_plan(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``jaxtap plan``."""
    _configure(parser)
    parser.add_argument(
        "--json", metavar="FILE", help="also write the plan to FILE; - prints it instead"
    )


def configure_report(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``jaxtap report``."""
    _configure(parser)
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page with plots to FILE")
    parser.add_argument(
        "--json", metavar="FILE", help="also write the report to FILE; - prints it instead"
    )
    parser.add_argument("--sort", choices=ORDERS, default="program", help="order of the operations")
    parser.add_argument("--top", type=_positive, metavar="N", help="print only the first N of them")
    parser.add_argument("--title", help="of the page (default: FILE:FUNCTION)")
    parser.add_argument("--no-time", action="store_true", help="time nothing")


def _configure(parser: argparse.ArgumentParser) -> None:
    parser.description = f"{parser.description}. {_DESCRIPTION}"
    parser.add_argument("function", metavar="FILE:FUNCTION", help="model.py:forward, say")
    parser.add_argument("args", nargs="*", metavar="ARG", help="its arguments, such as 'params'")
    rules = parser.add_argument_group("rules (default: int8 for parameters and activations)")
    rules.add_argument(
        "--rules",
        metavar="RULES",
        help="an expression on what FILE defines: rules, or a provider; or JSON: the fields of a "
        "rule, or a list of those",
    )
    rules.add_argument("--weight", metavar="QTYPE", help="of all parameters, such as int4")
    rules.add_argument("--act", metavar="QTYPE", help="of all activations, such as int8")
    rules.add_argument("--tile", type=_tile, metavar="N", help="elements that share a scale")
    parser.add_argument(
        "--provider",
        metavar="NAME",
        help="an installed provider other than provider-xla's, with --config instead of rules",
    )
    parser.add_argument(
        "--config", metavar="JSON", help="keyword arguments of the provider's factory, as an object"
    )
    parser.add_argument(
        "--engine", choices=["trace", "patch"], help="what taps the function (default: the best)"
    )
    parser.add_argument(
        "--strict", action="store_true", help="rules that can't be followed are an error"
    )


def run_plan(args: argparse.Namespace) -> int:
    """Print a plan.

    Returns:
        0.

    Raises:
        JaxtapError: the file, the function, an argument or the rules can't be used.
    """
    _check_folders(args.json)
    plan, _, _ = _plan(args)
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
    plan, params, batch = _plan(args)
    with _told(f"{args.function} can't be measured"):
        import jax

        from ..providers.plan import Plan

        if any(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves((params, batch))):
            raise JaxtapError(
                "A report runs the function: its arguments must have values. Write expressions on "
                f"what the file defines, such as 'params', not types. Got {args.args}."
            )
        _check_has(plan, "report", "jaxtap report")
        if not isinstance(plan, Plan):
            return _report_of_another(args, plan, params, batch)
        statistics = plan.calibrate(plan.fn, params, [batch]) if plan.ranges else None
        report = plan.report(params, *batch, statistics=statistics, time=not args.no_time)
    if args.json == "-":
        print(json.dumps(report.as_json(), indent=2, allow_nan=False))
    else:
        print(report.text(args.sort, args.top))
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


def _plan(args: argparse.Namespace) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return the plan, the parameters, and the other arguments."""
    module, fn = find_function(args.function)
    if args.args:
        values = [read_argument(text, module) for text in args.args]
    else:
        fn, *values = _returned(args.function, fn)
    with _told("The rules can't be used"):
        provider = _provider(args, module)
        if not hasattr(provider, "plan"):
            raise JaxtapError(
                f"A {type(provider).__name__} makes no plans: it has no method plan. See "
                "interception_core.Provider."
            )
    at = getattr(provider, "params_argnum", 0)
    if at >= len(values):
        raise JaxtapError(
            f"{args.function} has {len(values)} arguments, and argument {at} holds the parameters."
        )
    params = values.pop(at)
    with _told(f"{args.function} can't be planned"), warnings.catch_warnings():
        from ..errors import QuantizationWarning

        # The plan lists them as problems, which are printed with it.
        warnings.simplefilter("ignore", QuantizationWarning)
        return provider.plan(fn, params, *values), params, tuple(values)


def _returned(given: str, fn: Callable[..., Any]) -> tuple[Any, ...]:
    """Return a function and its arguments: what ``fn`` returns."""
    how = (
        "Give the arguments of the function after it, or name a function without arguments that "
        "returns (function, parameters, *other arguments)."
    )
    try:
        found = fn()
    except Exception as error:
        raise JaxtapError(
            f"{given} can't be called without arguments: {_line(error)} {how}"
        ) from error
    if not isinstance(found, tuple | list) or len(found) < 2 or not callable(found[0]):
        what = type(found).__name__
        if isinstance(found, tuple | list):
            what += f" of ({', '.join(type(one).__name__ for one in found)})"
        raise JaxtapError(f"{given} returned an object of type {what}. {how}")
    return tuple(found)


def _provider(args: argparse.Namespace, module: ModuleType) -> Any:
    from ..providers.ptq import PtqProvider
    from ..rules.rule import QuantizationRule

    simple = {"weight_qtype": args.weight, "act_qtype": args.act, "tile_size": args.tile}
    config = {"engine": args.engine, "strict": args.strict}
    if args.provider is not None:
        return _named(args)
    if args.config is not None:
        raise JaxtapError("--config is for --provider NAME. Give rules, or name a provider.")
    if args.rules is None:
        if args.weight is None and args.act is None:
            simple |= {"weight_qtype": "int8", "act_qtype": "int8"}
        return PtqProvider(QuantizationRule(**simple), **config)
    if any(value is not None for value in simple.values()):
        raise JaxtapError("Give either --rules, or --weight, --act and --tile.")
    if args.rules.lstrip()[:1] in ("{", "["):
        return PtqProvider(_from_json(args.rules), **config)
    found = read_argument(args.rules, module)
    if isinstance(found, Provider):
        if args.engine is not None or args.strict:
            raise JaxtapError(
                f"--engine and --strict must be left out for the provider {args.rules}. Set them "
                "in the file."
            )
        return found
    return PtqProvider(found, **config)


def _named(args: argparse.Namespace) -> Any:
    """Return the provider that ``--provider`` names."""
    given = {"--rules": args.rules, "--weight": args.weight, "--act": args.act, "--tile": args.tile}
    wrong = [name for name, value in given.items() if value is not None]
    if wrong:
        raise JaxtapError(
            f"{' and '.join(wrong)} can't be given with --provider, whose factory takes --config, "
            "an object in JSON."
        )
    config = {} if args.config is None else _object(args.config)
    if args.engine is not None:
        config["engine"] = args.engine
    if args.strict:
        config["strict"] = True
    return get_provider(args.provider, **config)


def _object(text: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise JaxtapError(f"--config must be an object in JSON, got {text!r}: {error}.") from error
    if not isinstance(found, dict):
        raise JaxtapError(f"--config must be an object in JSON, got {text!r}.")
    return found


def _from_json(text: str) -> list[Any]:
    from ..rules.rule import QuantizationRule

    try:
        content = json.loads(text)
    except json.JSONDecodeError as error:
        raise JaxtapError(f"--rules must be JSON, got {text!r}: {error}.") from error
    known = [field.name for field in dataclasses.fields(QuantizationRule)]
    rules = []
    for fields in content if isinstance(content, list) else [content]:
        if not isinstance(fields, dict):
            raise JaxtapError(f"--rules must hold objects of a rule's fields, got {fields!r}.")
        for name in fields:
            if name not in known:
                raise JaxtapError(f"A rule has no field {name!r}. It has: {', '.join(known)}.")
        rules.append(QuantizationRule(**fields))
    return rules


@contextmanager
def _told(what: str) -> Iterator[None]:
    """Make every error one of jaxtap's, which the command line prints."""
    try:
        yield
    except JaxtapError:
        raise
    except Exception as error:
        raise JaxtapError(f"{what}: {_line(error)}") from error


def _line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    text = f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
    return text if text.endswith(".") else f"{text}."


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


def _tile(text: str) -> int | float:
    return float(text) if "." in text else int(text)
