"""Strict reading of files' JSON: foreign content fails here.

Checksums find accidents: a sealed text holds its SHA-256, computed with zeros there. A schema finds
content that is malformed although its checksum is right. Schemas are msgspec's: types and
``Object`` classes.
"""

from __future__ import annotations

import hashlib
import json
import re
import sys
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from ..extras import install_form
from .forms import is_quantized, known_forms

Size = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""The size of an axis."""

FileName = Annotated[str, msgspec.Meta(pattern=r"^(?!\.{0,2}$)[^/\\\x00]*$")]
"""The name of a file in a folder, and not a path."""

_Checked = TypeVar("_Checked")


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


def check(value: Any, schema: type[_Checked]) -> _Checked:
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


_Shape = list[Size]
# 1e999 is JSON, and reads as infinity.
_Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_Tile = tuple[Annotated[int, Meta(lt=0)], Annotated[int, Meta(gt=0)]]


class _TupleKey(Object, frozen=True):
    parts: list[_Key] = field(name="tuple")


_Key = str | int | float | bool | _TupleKey


class _Node(Object, frozen=True):
    """A tree node, of one of four kinds: see ``tree.named_leaves``."""

    entries: list[tuple[_Key, _Structure]] | UnsetType = field(default=UNSET, name="dict")
    items: list[_Structure] | UnsetType = field(default=UNSET, name="list")
    parts: list[_Structure] | UnsetType = field(default=UNSET, name="tuple")
    type_name: str | UnsetType = field(default=UNSET, name="object")
    fields: list[tuple[_Key, _Structure]] | UnsetType = UNSET

    def __post_init__(self):
        given = {name for name in self.__struct_fields__ if getattr(self, name) is not UNSET}
        if given not in ({"entries"}, {"items"}, {"parts"}, {"type_name", "fields"}):
            raise ValueError("A node must be one of dict, list, tuple, and object with fields")
        pairs = self.fields if isinstance(self.entries, UnsetType) else self.entries
        if not isinstance(pairs, UnsetType):
            keys = [json.dumps(msgspec.to_builtins(key)) for key, _ in pairs]
            if len(set(keys)) != len(keys):
                raise ValueError(f"A node must have each key once, got a key twice in {keys}")


_Structure = None | int | _Node


class _Typed(Object, frozen=True):
    shape: _Shape
    dtype: str


class _PrngKey(_Typed, frozen=True):
    impl: str


class _Quantized(_Typed, frozen=True):
    qtype: str
    ragged_tiles: list[_Tile] | UnsetType = UNSET


class _Packed(_Quantized, frozen=True):
    def __post_init__(self):
        if not self.shape:
            raise ValueError("A packed array must have an axis, got shape []")


class _Nothing(Object, frozen=True):
    pass


class _Statistics(Object, frozen=True):
    decay: _Finite | None
    symmetric: bool


class _History(Object, frozen=True):
    length: Annotated[int, Meta(ge=1)]
    compute: Literal["max", "most_recent"]
    margin: int


class _Value(Object, frozen=True):
    type: Literal["bool", "int", "float", "str"]
    value: str


class _Static(Object, frozen=True):
    type: str


class _Form(Object, frozen=True):
    kind: str
    about: dict[str, Any]

    def __post_init__(self):
        schema, _ = _schema_of(self.kind)
        check(self.about, schema)


class _Held(_Form, frozen=True):
    def __post_init__(self):
        super().__post_init__()
        if "shape" not in self.about:
            raise ValueError(f"A held {self.kind} must have a shape")


class _Carrier(_Typed, frozen=True):
    params: str
    keys: list[str]
    loops: list[Any]
    held: list[_Held | None]
    inputs: list[list[str]] | UnsetType = UNSET

    def __post_init__(self):
        count = len(self.keys)
        if len(self.held) != count + 1 or len(self.loops) != count:
            raise ValueError(f"A carrier with {count} keys must hold as many values and itself")
        if self.inputs is not UNSET and len(self.inputs) != count:
            raise ValueError(f"A carrier with {count} keys must have the inputs of as many values")


_FORMS: dict[str, tuple[Any, set[str]]] = {
    "array": (_Typed, {""}),
    "numpy": (_Typed, {""}),
    "key": (_PrngKey, {"data"}),
    "qarray": (_Quantized, {"qvalue", "scale"}),
    "packed": (_Packed, {"planes", "scale"}),
    "calibration": (_Nothing, {"upper"}),
    "statistics": (_Statistics, {"upper", "count"}),
    "history": (_History, {"past", "upper"}),
    "value": (_Value, set()),
    "static": (_Static, set()),
    "carrier": (_Carrier, set()),
}
"""By kind of a form: the schema of what is known about it, and the parts that it must have."""


class _OtherForm(OpenObject, frozen=True):
    """A stored form of another package, which checks the rest itself."""

    shape: _Shape
    dtype: str
    qtype: str


def _schema_of(kind: str) -> tuple[Any, set[str]]:
    if kind in _FORMS:
        return _FORMS[kind]
    if is_quantized(kind):
        return _OtherForm, set()
    known = ", ".join(sorted({*_FORMS, *known_forms()}))
    raise ValueError(f"kind must be one of {known}, got {kind!r}. {install_form(kind)}")


class StoredLeaf(_Form, frozen=True):
    """A leaf in a file.

    Attributes:
        kind: see ``Form``.
        about: what rebuilds it, as JSON; its shape, dtype and qtype if it has them.
        name: its dotted path.
        tensors: by part, the name of the tensor.
    """

    name: str
    tensors: dict[str, str]

    def __post_init__(self):
        super().__post_init__()
        _, parts = _schema_of(self.kind)
        missing = parts - self.tensors.keys()
        if missing:
            raise ValueError(f"{self.name} must have tensors {sorted(missing)}")
        if self.kind == "carrier":
            held = {str(i) for i in range(len(self.about["held"]))}
            if not {part.partition(".")[0] for part in self.tensors} <= held:
                raise ValueError(f"{self.name} must have tensors of what it holds alone")


class Tree(Object, frozen=True):
    """A tree in a file: its structure (see ``named_leaves``) and its leaves."""

    structure: Any
    leaves: tuple[StoredLeaf, ...]

    def __post_init__(self):
        check(self.structure, _Structure)


class _Rule(OpenObject, frozen=True):
    type_name: str = field(name="class")


class _Weight(OpenObject, frozen=True):
    method: str


class _Plan(Object, frozen=True):
    rules: list[_Rule]
    weights: dict[str, _Weight]


class _PlanOfAnother(OpenObject, frozen=True):
    provider: str
    config: dict[str, Any]


class FormatOnly(OpenObject, frozen=True):
    """What manifests of all versions have."""

    format: Annotated[int, Meta(ge=1)]
    versions: dict[str, str]


def check_plan_json(plan: dict[str, Any]) -> None:
    """Raise ValueError unless a plan is what ``plan_json`` returns."""
    check(plan, _PlanOfAnother if "provider" in plan else _Plan)
