"""Strict reading of files' JSON: foreign content fails here.

Checksums find accidents. A schema finds content that is malformed although its checksum is right.
Schemas are msgspec's: types and ``Object`` classes.
"""

from __future__ import annotations

import json
from typing import Annotated, Any, TypeVar

import msgspec

Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""The size of an axis."""

FileName = Annotated[str, msgspec.Meta(pattern=r"^(?!\.{0,2}$)[^/\\\x00]*$")]
"""The name of a file in a folder, and not a path."""

_Value = TypeVar("_Value")


class Object(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A JSON object with the annotated fields and no others."""


class OpenObject(msgspec.Struct, frozen=True):
    """A JSON object with the annotated fields; others are ignored."""


def read_json(text: str | bytes) -> Any:
    """Return the value of a JSON text.

    Raises:
        ValueError: the text is not JSON, has a key twice in an object, or has NaN or infinity.
    """

    def pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
        result = dict(found)
        if len(result) != len(found):
            raise ValueError(f"an object has a key twice: {[key for key, _ in found]}")
        return result

    def constant(word: str) -> Any:
        raise ValueError(f"{word} is not a number of JSON")

    return json.loads(text, object_pairs_hook=pairs, parse_constant=constant)


def check(value: Any, schema: type[_Value]) -> _Value:
    """Return a JSON value as what its schema says.

    Raises:
        ValueError: the value does not match; says where.
    """
    try:
        return msgspec.convert(value, schema, strict=True)
    except msgspec.ValidationError as error:
        raise ValueError(str(error)) from error
