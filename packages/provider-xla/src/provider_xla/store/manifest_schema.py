"""The trees of a manifest, and the schema of what it knows about each leaf."""

from __future__ import annotations

import json
import sys
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType, field

from ..extras import install_form
from .forms import is_quantized, known_forms
from .schema import Object, OpenObject, Size, check

_Shape = list[Size]
# 1e999 is JSON, and reads as infinity.
_Finite = Annotated[float, Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_Tile = tuple[Annotated[int, Meta(lt=0)], Annotated[int, Meta(gt=0)]]


class _TupleKey(Object):
    parts: list[_Key] = field(name="tuple")


_Key = str | int | float | bool | _TupleKey


class _Node(Object):
    """A tree node, of one of four kinds: see ``tree.describe``."""

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


class _Typed(Object):
    shape: _Shape
    dtype: str


class _PrngKey(_Typed):
    impl: str


class _Quantized(_Typed):
    qtype: str
    ragged_tiles: list[_Tile] | UnsetType = UNSET


class _Packed(_Quantized):
    def __post_init__(self):
        if not self.shape:
            raise ValueError("A packed array must have an axis, got shape []")


class _Nothing(Object):
    pass


class _Statistics(Object):
    decay: _Finite | None
    symmetric: bool


class _History(Object):
    length: Annotated[int, Meta(ge=1)]
    compute: Literal["max", "most_recent"]
    margin: int


class _Value(Object):
    type: Literal["bool", "int", "float", "str"]
    value: str


class _Static(Object):
    type: str


class _Form(Object):
    kind: str
    about: dict[str, Any]

    def __post_init__(self):
        schema, _ = _schema_of(self.kind)
        check(self.about, schema)


class _Held(_Form):
    def __post_init__(self):
        super().__post_init__()
        if "shape" not in self.about:
            raise ValueError(f"A held {self.kind} must have a shape")


class _Carrier(_Typed):
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


class _OtherForm(OpenObject):
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


class StoredLeaf(_Form):
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


class Tree(Object):
    """A tree in a file: its structure (see ``describe``) and its leaves."""

    structure: Any
    leaves: tuple[StoredLeaf, ...]

    def __post_init__(self):
        check(self.structure, _Structure)


class _Rule(OpenObject):
    type_name: str = field(name="class")


class _Weight(OpenObject):
    method: str


class _Plan(Object):
    rules: list[_Rule]
    weights: dict[str, _Weight]


class _PlanOfAnother(OpenObject):
    provider: str
    config: dict[str, Any]


class FormatOnly(OpenObject):
    """What manifests of all versions have."""

    format: Annotated[int, Meta(ge=1)]
    versions: dict[str, str]


def check_plan_json(plan: dict[str, Any]) -> None:
    """Raise ValueError unless a plan is what ``plan_json`` returns."""
    check(plan, _PlanOfAnother if "provider" in plan else _Plan)
