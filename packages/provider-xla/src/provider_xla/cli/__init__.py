"""How commands make a plan of a function in a file, and what they print and write: public."""

from __future__ import annotations

import argparse
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from interception_core import JaxtapError, Provider, UnknownNameError, find_bridge, get_provider
from interception_core.cli import find_function, read_argument

from ..errors import check_has

__all__ = [
    "check_folders",
    "check_has",
    "configure",
    "make_plan",
    "told",
    "write_whole",
    "written",
]

_DESCRIPTION = """
FUNCTION is the function to quantize, and each ARG one of its arguments, the parameters first: an
expression on what FILE defines, or a type such as 'f32[8,64]'. Without any ARG, FUNCTION is called
and returns them all: (function, parameters, *other arguments). Instead of a function and its
parameters there may be a model object of Flax or Equinox, or a method of one: (model, *inputs).
"""


def configure(
    parser: argparse.ArgumentParser,
    description: str = _DESCRIPTION,
    files: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Add the options of a function, its arguments and rules.

    Args:
        parser: the command's.
        description: what the arguments are.
        files: positional arguments between the function and its arguments, with their help.
    """
    parser.description = f"{parser.description}. {description}"
    parser.add_argument("function", metavar="FILE:FUNCTION", help="model.py:forward, say")
    for name, about in files.items():
        parser.add_argument(name, metavar=name.upper(), help=about)
    parser.add_argument("args", nargs="*", metavar="ARG", help="its arguments, such as 'params'")
    rules = parser.add_argument_group("rules (default: int8 for parameters and activations)")
    rules.add_argument(
        "--rules",
        metavar="RULES",
        help="an expression on what FILE defines: rules, or a provider; or JSON: the fields of a "
        "rule, or a list of those",
    )
    rules.add_argument(
        "--preset", metavar="NAME", help="such as int8 or w4a8: jaxtap presets lists them"
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


def make_plan(args: argparse.Namespace, params: Any = None) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return the plan, the parameters (``params`` if given), and the other arguments."""
    module, fn = find_function(args.function)
    if args.args:
        values = [read_argument(text, module) for text in args.args]
    else:
        fn, *values = _returned(args.function, fn)
    with told("The rules can't be used"):
        provider = _provider(args, module)
        if not hasattr(provider, "plan"):
            raise JaxtapError(
                f"A {type(provider).__name__} makes no plans: it has no method plan. See "
                "interception_core.Provider."
            )
    model, method = _model_of(fn)
    if model is not None:
        return _planned_model(args, model, method, provider, values)
    at = getattr(provider, "params_argnum", 0)
    if args.args and params is not None:
        values.insert(at, params)
    if at >= len(values):
        raise JaxtapError(
            f"{args.function} has {len(values)} arguments, and argument {at} holds the parameters."
        )
    params = values.pop(at)
    with told(f"{args.function} can't be planned"), warnings.catch_warnings():
        from ..errors import QuantizationWarning

        # The plan lists them as problems, which are printed with it.
        warnings.simplefilter("ignore", QuantizationWarning)
        return provider.plan(fn, params, *values), params, tuple(values)


def _model_of(fn: Any) -> tuple[Any, str]:
    """Return the model object that a function is, or is a method of, and the method's name.

    The model is None for other functions.
    """
    owner = getattr(fn, "__self__", fn)
    # Equinox's jitted functions are objects of its Module, too.
    if owner is fn and hasattr(fn, "__wrapped__"):
        return None, ""
    try:
        find_bridge(owner)
    except UnknownNameError:
        return None, ""
    return owner, "__call__" if owner is fn else fn.__name__


def _planned_model(
    args: argparse.Namespace, model: Any, method: str, provider: Any, inputs: list[Any]
) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return the plan of a model object, its parameters, and the inputs."""
    from ..bridges.model import planned
    from ..errors import QuantizationWarning

    with told(f"{args.function} can't be planned"), warnings.catch_warnings():
        warnings.simplefilter("ignore", QuantizationWarning)
        bridge, plan, _ = planned(model, provider, inputs, (method,), {})
        return plan, bridge.parameters(model), tuple(inputs)


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
    from ..providers.provider import PtqProvider
    from ..rules.rule import QuantizationRule

    simple = {"weight_qtype": args.weight, "act_qtype": args.act, "tile_size": args.tile}
    config = {"engine": args.engine, "strict": args.strict}
    if args.provider is not None:
        return _named(args)
    if args.config is not None:
        raise JaxtapError("--config is for --provider NAME. Give rules, or name a provider.")
    if args.preset is not None:
        if args.rules is not None or any(value is not None for value in simple.values()):
            raise JaxtapError("Give either --preset, or --rules, or --weight, --act and --tile.")
        return PtqProvider(args.preset, **config)
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
    given = {"--preset": args.preset, "--rules": args.rules, "--weight": args.weight}
    given |= {"--act": args.act, "--tile": args.tile}
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
def told(what: str) -> Iterator[None]:
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


def _tile(text: str) -> int | float:
    return float(text) if "." in text else int(text)


def check_folders(*paths: Any) -> None:
    """Raise JaxtapError where a file has no folder to be written into."""
    for path in paths:
        if path is not None and str(path) != "-" and not Path(path).parent.is_dir():
            raise JaxtapError(
                f"There is no folder {Path(path).parent} to write {Path(path).name} into."
            )


def written(path: Any, save: Callable[[Any], None], quiet: bool = False) -> None:
    """Write a file by ``save``, and say so.

    Raises:
        JaxtapError: it can't be written.
    """
    try:
        save(path)
    except OSError as error:
        raise JaxtapError(f"{path} can't be written: {error}") from error
    if not quiet:
        print(f"Wrote {path}.")


def write_whole(path: str | Path, text: str) -> None:
    """Write under a temporary name, so that ``path`` is whole or absent."""
    path = Path(path)
    part = path.with_name(f".{path.name}.part")
    try:
        part.write_text(text, encoding="utf-8")
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)
