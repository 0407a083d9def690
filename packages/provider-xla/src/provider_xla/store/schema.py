"""Strict reading of files' JSON: foreign content fails here.

Checksums find accidents: a sealed text holds its SHA-256, computed with zeros there. A schema finds
content that is malformed although its checksum is right. Schemas are msgspec's: types and
``Object`` classes.
"""

from __future__ import annotations

import hashlib
import json
import re
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


FIELD = "jaxtap.sha256"
BLANK = "0" * 64
# Inside a JSON string the quotes would be escaped, so only the field itself matches.
_FIELD = re.compile(rb'"jaxtap\.sha256":"([0-9a-f]{64})"')


def canonical(value: Any) -> str:
    """Return JSON with sorted keys and no spaces, in ASCII."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def seal(text: bytes) -> bytes:
    """Return a JSON text with the checksum in ``jaxtap.sha256``."""
    (found,) = _FIELD.finditer(text)
    digest = hashlib.sha256(text).hexdigest().encode()
    return text[: found.start(1)] + digest + text[found.end(1) :]


def is_intact(text: bytes) -> bool | None:
    """Return whether a sealed text is intact; None without a checksum."""
    found = list(_FIELD.finditer(text))
    if len(found) != 1:
        return None if not found else False
    start, end = found[0].span(1)
    digest = hashlib.sha256(text[:start] + BLANK.encode() + text[end:]).hexdigest()
    return digest.encode() == text[start:end]
