"""Quantized arrays in other people's files: exported programs, and flax's state dicts."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import ModuleType
from typing import Any

import jax
import jax.export
import numpy as np
from jax.typing import DTypeLike

from interception_core import when_imported

_kinds: list[type] = []
"""The classes to register; flax's module registers them when the program imports it."""


def register_state(kind: type) -> None:
    """Let flax.serialization write a pytree class: ``to_bytes``, ``to_state_dict`` and so on.

    The order of imports does not matter, and nothing imports flax.

    Args:
      kind: the class.
    """
    if not _kinds:
        when_imported("flax.serialization", _register_all)
    _kinds.append(kind)
    if _flax is not None:
        _register(_flax, kind)


_flax: ModuleType | None = None


def _register_all(module: ModuleType) -> None:
    global _flax
    _flax = module
    for kind in _kinds:
        _register(module, kind)


def _register(module: ModuleType, kind: type) -> None:
    module.register_serialization_state(kind, to_state, from_state, override=True)


def to_state(value: Any) -> dict[str, Any]:
    """Return a stored array as flax.serialization writes it: its format, and arrays by path."""
    found, _ = jax.tree_util.tree_flatten_with_path(value)
    return {
        "qtype": getattr(value, "qtype", type(value).__name__),
        **{_path(keys): leaf for keys, leaf in found},
    }


def from_state(target: Any, state: dict[str, Any]) -> Any:
    """Return the written array in the place of a similar one.

    Raises:
      ValueError: the two have other formats or other arrays.
    """
    expected = to_state(target)
    if expected.keys() != state.keys() or expected["qtype"] != state["qtype"]:
        raise ValueError(
            f"A parameter that was saved as {state.get('qtype')} with {sorted(state)} must be "
            f"loaded as such, got a target that is {expected['qtype']} with {sorted(expected)}. "
            "Load it into parameters that are quantized by the same rules."
        )
    found, treedef = jax.tree_util.tree_flatten_with_path(target)
    return jax.tree.unflatten(treedef, [state[_path(keys)] for keys, _ in found])


def _path(keys: tuple[Any, ...]) -> str:
    return "/".join(jax.tree_util.keystr((key,), simple=True) for key in keys)


_PLAIN = (str, int, float, bool, type(None))


def register_serialization(
    node: type,
    encode: Callable[[Any], Any] | None = None,
    decode: Callable[[Any], Any] | None = None,
    *,
    name: str | None = None,
) -> None:
    """Let ``jax.export`` and ``flax.serialization`` save trees with nodes of a dataclass.

    The static fields are written as JSON: numbers, text, dtypes and tuples of these.

    Args:
      node: the class, after ``jax.tree_util.register_dataclass``.
      encode: turns a static value of another kind into JSON.
      decode: turns that JSON into the value again.
      name: what exported programs call it; None is its name after that of its package.

    Raises:
      ValueError: the class or its name is registered already.
    """
    register_state(node)
    fields = dataclasses.fields(node)
    static = [field.name for field in fields if field.metadata.get("static")]
    arrays = [field.name for field in fields if not field.metadata.get("static")]

    def write(values: Any) -> bytes:
        found = {name: _encoded(value, encode) for name, value in zip(static, values, strict=True)}
        return json.dumps(found).encode()

    def read(text: bytes | bytearray) -> tuple[Any, ...]:
        found = json.loads(bytes(text))
        return tuple(_decoded(found[name], decode) for name in static)

    def build(aux_data: Any, children: Any) -> Any:
        return node(**dict(zip((*arrays, *static), (*children, *aux_data), strict=True)))

    jax.export.register_pytree_node_serialization(
        node,
        serialized_name=name or f"{node.__module__.partition('.')[0]}.{node.__name__}",
        serialize_auxdata=write,
        deserialize_auxdata=read,
        from_children=build,
    )


def _encoded(value: Any, encode: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, tuple):
        return [_encoded(one, encode) for one in value]
    if isinstance(value, np.dtype):
        return {"dtype": value.name}
    if encode is not None:
        return {"other": encode(value)}
    raise TypeError(
        f"a static field must be of numbers, text, dtypes and tuples to be exported, got {value!r}."
    )


def _decoded(value: Any, decode: Callable[[Any], Any] | None) -> Any:
    if isinstance(value, list):
        return tuple(_decoded(one, decode) for one in value)
    if not isinstance(value, dict):
        return value
    if "dtype" in value:
        name: DTypeLike = value["dtype"]
        return jax.numpy.dtype(name)
    assert decode is not None
    return decode(value["other"])
