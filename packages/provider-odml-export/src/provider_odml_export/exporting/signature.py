"""Signatures: what of a function becomes callable in the file."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from provider_odml import OdmlError
from provider_odml.features import is_array, is_key


@dataclass(frozen=True)
class Signature:
    """One signature of a .tflite.

    Attributes:
        args: arguments of the function but for the parameters: arrays of sample data, of the
            shapes that the file is for; other values are constants.
        fn: the function, if it is another than that of ``export``.
        inputs: a name for each array among the arguments; None for those of the arguments.
        outputs: a name for each result; None for ``output_0`` and so on, or keys of a dictionary.
    """

    args: Sequence[Any]
    fn: Callable[..., Any] | None = None
    inputs: Sequence[str] | None = None
    outputs: Sequence[str] | None = None


def signatures_of(given: Any, args: Sequence[Any]) -> dict[str, Signature]:
    """Return the signatures that ``export`` was asked for.

    Raises:
        OdmlError: there is none, or arguments hold no sample data.
    """
    if given is None:
        given = {"serving_default": Signature(tuple(args))}
    if not isinstance(given, Mapping) or not given:
        raise OdmlError(
            f"signatures must map names to Signature(args) or tuples of arguments, got {given!r}."
        )
    found = {}
    for name, one in given.items():
        if not isinstance(one, Signature | tuple | list):
            raise OdmlError(
                f"Signature {name!r} must be a Signature or a tuple of arguments, got a "
                f"{type(one).__name__}. Write odml.Signature((x,))."
            )
        one = one if isinstance(one, Signature) else Signature(tuple(one))
        for leaf in jax.tree.leaves(one.args):
            if is_array(leaf) and isinstance(leaf, jax.ShapeDtypeStruct):
                raise OdmlError(
                    f"The arguments of signature {name!r} must be sample data, on which the file "
                    f"is compared with JAX, got {leaf}. Pass arrays."
                )
        if not any(is_array(leaf) for leaf in jax.tree.leaves(one.args)):
            raise OdmlError(
                f"Signature {name!r} must have arrays among its arguments, got {one.args!r}."
            )
        found[name] = one
    return found


def input_names(fn: Callable[..., Any], signature: Signature, argnum: int) -> tuple[str, ...]:
    """Return a name for each array among the arguments.

    Raises:
        OdmlError: another number of names was given.
    """
    paths, _ = jax.tree_util.tree_flatten_with_path(tuple(signature.args))
    arrays = [path for path, leaf in paths if is_array(leaf) and not is_key(leaf)]
    if signature.inputs is not None:
        if len(signature.inputs) != len(arrays):
            raise OdmlError(
                f"inputs must name each of {len(arrays)} arrays, got {list(signature.inputs)}."
            )
        return tuple(signature.inputs)
    names = _parameter_names(fn, argnum)
    return tuple(_unique([_name(path, names) for path in arrays]))


def output_names(signature: Signature, out: Any) -> tuple[str, ...]:
    """Return a name for each result. Raise OdmlError as ``input_names``."""
    paths, _ = jax.tree_util.tree_flatten_with_path(out)
    if signature.outputs is not None:
        if len(signature.outputs) != len(paths):
            raise OdmlError(
                f"outputs must name each of {len(paths)} results, got {list(signature.outputs)}."
            )
        return tuple(signature.outputs)
    names = [
        _clean(jax.tree_util.keystr(path)) if _has_keys(path) else f"output_{i}"
        for i, (path, _) in enumerate(paths)
    ]
    return tuple(_unique(names))


def _has_keys(path: Any) -> bool:
    return any(isinstance(key, jax.tree_util.DictKey | jax.tree_util.GetAttrKey) for key in path)


def _parameter_names(fn: Callable[..., Any], argnum: int) -> list[str]:
    try:
        parameters = list(inspect.signature(fn).parameters.values())
    except (TypeError, ValueError):
        return []
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    names = [p.name for p in parameters if p.kind in plain]
    return names[:argnum] + names[argnum + 1 :]


def _name(path: Any, names: Sequence[str]) -> str:
    index = path[0].idx
    first = names[index] if index < len(names) else f"input_{index}"
    rest = jax.tree_util.keystr(path[1:])
    return _clean(first + rest) if rest else first


def _clean(text: str) -> str:
    return re.sub(r"[^0-9A-Za-z]+", "_", text).strip("_") or "output"


def _unique(names: Sequence[str]) -> list[str]:
    found: list[str] = []
    for name in names:
        unique, n = name, 1
        while unique in found:
            unique, n = f"{name}_{n}", n + 1
        found.append(unique)
    return found
