"""Pytrees in exported programs: what ``jax.export`` writes of a quantized array."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

import jax.export
import numpy as np
from jax.typing import DTypeLike

from quant_numerics.array.flax_state import register_state

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
