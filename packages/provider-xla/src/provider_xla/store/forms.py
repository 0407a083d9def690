"""Leaves and rules in files: taken apart into arrays and JSON, and put together again."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from hijax_trace import Carrier
from interception_core import FormSpec, declared_specs, get_form

from ..errors import StoreError
from ..extras import feature
from ..plan.weight import Granularity
from ..program.matching import Under
from ..rules.qt_rule import QtRule
from ..rules.rule import QuantizationRule
from .carriers import is_storable

CARRIER = "carrier"
"""The kind of a parameter with derived weights beside it."""


@dataclasses.dataclass(frozen=True)
class Form:
    """A leaf, taken apart.

    Attributes:
        kind: that of a stored form that a plugin declares, "array", "numpy", "key",
            "carrier", "calibration", "statistics", "history", "value" or "static".
        about: what else rebuilds the leaf, as JSON; shape and dtype if it has them.
        parts: by name, the dtype and shape of each array that it consists of.
        arrays: returns these arrays by name; None if the leaf is abstract.
    """

    kind: str
    about: Mapping[str, Any]
    parts: Mapping[str, tuple[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    arrays: Callable[[], Mapping[str, Any]] | None = None


def take_apart(
    name: str,
    leaf: Any,
    granularity: Granularity | None = None,
    derived: Mapping[str, Granularity] | None = None,
) -> Form:
    """Return the form of a leaf, which may be abstract.

    A weight that is packed for kernels has the granularity of its plan, since packing repeats
    scales, and each derived weight its own, by the key of its expression.
    """
    if isinstance(leaf, Carrier):
        return _carrier(name, leaf, granularity, derived or {})
    if qn.is_form(leaf):
        return _stored(name, leaf, granularity)
    if isinstance(leaf, qn.Calibration):
        return _of(name, "calibration", {}, leaf._asdict())
    if isinstance(leaf, qn.Statistics):
        state = leaf.state
        about = average_json(leaf.average)
        if isinstance(leaf.average, qn.AmaxHistory):
            parts = {"past": state.past.upper, "upper": state.bounds.upper}
            return _of(name, "history", about, parts)
        about["symmetric"] = leaf.symmetric
        parts = {**state.total._asdict(), "count": state.count}
        return _of(name, "statistics", about, parts)
    if type(leaf) in (bool, int, float, str):
        # repr of a float is exact, and writes infinity and NaN, which JSON lacks.
        text = leaf if isinstance(leaf, str) else repr(leaf)
        return Form("value", {"type": type(leaf).__name__, "value": text})
    if not (hasattr(leaf, "shape") and hasattr(leaf, "dtype")):
        return Form("static", {"type": getattr(leaf, "__qualname__", type(leaf).__qualname__)})
    about: dict[str, Any] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype)}
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        impl = str(jax.random.key_impl(leaf))
        return _of(name, "key", {**about, "impl": impl}, {"data": jax.random.key_data(leaf)})
    kind = "numpy" if isinstance(leaf, np.ndarray | np.generic) else "array"
    return _of(name, kind, about, {"": leaf})


def is_quantized(kind: str) -> bool:
    """Return whether leaves of a kind are stored forms."""
    return kind in known_forms()


def known_forms() -> list[str]:
    """Return the kinds of stored forms of installed plugins."""
    return [spec.name for spec in declared_specs(FormSpec)]


def put_together(name: str, kind: str, about: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    """Return the leaf that ``take_apart`` took apart.

    Raises:
        StoreError: the parts don't make such a leaf.
    """
    try:
        return _put_together(kind, about, parts)
    except Exception as error:  # forms of plugins may raise anything for what is damaged
        raise StoreError(f"{name} can't be made of what is stored: {error}") from error


def _put_together(kind: str, about: Mapping[str, Any], parts: Mapping[str, Any]) -> Any:
    if kind in ("array", "numpy"):
        return parts[""]
    if kind == CARRIER:
        return _held_together(about, parts)
    if kind == "calibration":
        return qn.Calibration(parts.get("lower"), parts["upper"])
    if kind == "statistics":
        average, symmetric = average_of({"decay": about["decay"]}), about["symmetric"]
        result = qn.Statistics(parts["upper"].shape, average, symmetric=symmetric)
        total = qn.Calibration(parts.get("lower"), parts["upper"])
        result.state = qn.AverageState(total, parts["count"])
        return result
    if kind == "history":
        past, upper = parts["past"], parts["upper"]
        result = qn.Statistics(upper.shape, average_of(about))
        if past.shape != (wanted := (*upper.shape, about["length"])):
            raise ValueError(f"a history of shape {past.shape} is not {wanted}")
        result.state = qn.HistoryState(qn.Calibration(None, past), qn.Calibration(None, upper))
        return result
    if kind == "key":
        return jax.random.wrap_key_data(parts["data"], impl=about["impl"])
    if kind == "value":
        text = about["value"]
        if about["type"] == "bool":
            return {"True": True, "False": False}[text]
        if about["type"] == "str":
            return text
        return {"int": int, "float": float}[about["type"]](text)
    return get_form(kind).from_parts(about, parts)


def part_of(leaf: Any, part: str) -> Any:
    """Return a leaf's part of that name; None without it."""
    if isinstance(leaf, Carrier):
        number, _, part = part.partition(".")
        held = [leaf.own, *leaf.derived.values()][int(number)]
        return part_of(held, part) if part else held
    return leaf.arrays().get(part) if qn.is_form(leaf) else getattr(leaf, part, None)


def _stored(name: str, leaf: qn.StoredForm, granularity: Granularity | None) -> Form:
    """Return the form of a stored parameter."""
    scales = None if granularity is None else granularity.scale_shape(leaf.shape)
    try:
        kind, about, arrays, make = leaf.to_parts(scales)
    except (AttributeError, NotImplementedError) as error:
        packed = "packed for a kernel whose package can't unpack it"
        what = f"a {type(leaf).__name__} that can't be saved" if leaf.platform is None else packed
        raise StoreError(
            f"{name} is {what} ({error}). Save plan.quantize(params, prepack=False)."
        ) from error
    form = _of(name, kind, about, arrays)
    if make is None:
        return form

    def made() -> Mapping[str, Any]:
        for array in jax.tree.leaves(leaf):
            _check(name, array)
        return make()

    return dataclasses.replace(form, arrays=made)


def _carrier(
    name: str,
    leaf: Carrier,
    granularity: Granularity | None,
    derived: Mapping[str, Granularity],
) -> Form:
    """Return the form of a parameter with derived weights beside it."""
    if not isinstance(leaf.is_parameter, Under):
        raise StoreError(f"{name} was not made by a plan. Save what plan.quantize returned.")
    held = [None if leaf.own is None else take_apart(name, leaf.own, granularity)]
    held += [take_apart(name, one, derived.get(key)) for key, one in leaf.derived.items()]
    about = {
        "shape": list(leaf.shape),
        "dtype": str(leaf.dtype),
        "params": leaf.is_parameter.prefix,
        "keys": list(leaf.derived),
        "loops": [dict(leaf.loops)[key] for key in leaf.derived],
        "inputs": [list(dict(leaf.inputs).get(key, ())) for key in leaf.derived],
        "held": [None if one is None else {"kind": one.kind, "about": one.about} for one in held],
    }
    forms = {i: one for i, one in enumerate(held) if one is not None}

    def joined(number: int, part: str) -> str:
        return f"{number}.{part}" if part else str(number)

    parts = {joined(i, part): kind for i, one in forms.items() for part, kind in one.parts.items()}
    if any(one.arrays is None for one in forms.values()):
        return Form(CARRIER, about, parts)

    def arrays() -> Mapping[str, Any]:
        return {
            joined(i, part): array
            for i, one in forms.items()
            for part, array in one.arrays().items()  # type: ignore[misc]
        }

    return Form(CARRIER, about, parts, arrays)


def _held_together(about: Mapping[str, Any], parts: Mapping[str, Any]) -> Carrier:
    """Return a parameter with derived weights beside it."""
    made: list[Any] = [
        None if one is None else _put_together(one["kind"], one["about"], _below(parts, i))
        for i, one in enumerate(about["held"])
    ]
    is_key = made[0] is not None and about["held"][0]["kind"] == "key"
    inputs = about.get("inputs", [()] * len(about["keys"]))  # older files have none
    return Carrier(
        made[0],
        dict(zip(about["keys"], made[1:], strict=True)),
        tuple(zip(about["keys"], about["loops"], strict=True)),
        Under(about["params"]),
        tuple(about["shape"]),
        made[0].dtype if is_key else jnp.dtype(about["dtype"]),
        tuple((key, tuple(one)) for key, one in zip(about["keys"], inputs, strict=True)),
    )


def _below(parts: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the parts of one of the values that a carrier holds, by name."""
    found = {}
    for name, value in parts.items():
        first, _, rest = name.partition(".")
        if int(first) == number:
            found[rest] = value
    return found


def _of(name: str, kind: str, about: Mapping[str, Any], parts: Mapping[str, Any]) -> Form:
    found = {part: array for part, array in parts.items() if array is not None}
    for array in found.values():
        _check(name, array)
    types = {part: (array.dtype.name, tuple(array.shape)) for part, array in found.items()}
    concrete = all(isinstance(x, jax.Array | np.ndarray | np.generic) for x in found.values())
    return Form(kind, about, types, (lambda: found) if concrete else None)


def _check(name: str, array: Any) -> None:
    if isinstance(array, jax.core.Tracer):
        raise StoreError(f"{name} is {array}, inside of a transformation. Save outside of jit.")
    known = isinstance(array, jax.Array | np.ndarray | np.generic | jax.ShapeDtypeStruct)
    if not known or not is_storable(np.dtype(array.dtype).name):
        raise StoreError(
            f"{name} is a {type(array).__name__} of {getattr(array, 'dtype', 'no dtype')}, which "
            "can't be saved: only arrays of numbers, and quantized ones, can be. Of a Box or a "
            "Ref, save what it holds."
        )
    if isinstance(array, jax.Array) and array.is_deleted():
        raise StoreError(f"{name} was deleted or donated. Save it before.")


def average_json(average: qn.MovingAverage | qn.AmaxHistory) -> dict[str, Any]:
    """Return an average's, or a history's, fields."""
    return dataclasses.asdict(average)


def average_of(found: Mapping[str, Any]) -> qn.MovingAverage | qn.AmaxHistory:
    """Return what has these fields.

    Raises:
        TypeError, ValueError: nothing has them.
    """
    return qn.AmaxHistory(**found) if "length" in found else qn.MovingAverage(**found)


def rule_json(rule: QuantizationRule) -> dict[str, Any]:
    """Return a rule's class and its non-default fields."""

    def plain(value: Any) -> Any:
        average = isinstance(value, qn.MovingAverage | qn.AmaxHistory)
        return average_json(value) if average else repr(value)

    text = json.dumps({"class": type(rule).__name__, **rule.given}, default=plain, sort_keys=True)
    return json.loads(text)


def rule_of(written: Mapping[str, Any]) -> QuantizationRule:
    """Return the rule that ``rule_json`` wrote.

    Raises:
        UnknownNameError: no plugin has its class.
        MissingExtraError: the package that has it is not installed.
        TypeError, ValueError: its class has no such field or value.
    """
    fields = dict(of_today(written))
    name = fields.pop("class")
    if "static_average" in fields:
        fields["static_average"] = average_of(fields["static_average"])
    known = {cls.__name__: cls for cls in (QuantizationRule, QtRule)}
    # Those of plugins: ``rule-lora`` is LoraRule.
    kind = known.get(name) or feature(f"rule-{name.removesuffix('Rule').lower()}")
    return kind(**fields)


def of_today(written: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the rule of a file as this version writes it: a rank was a field of every rule."""
    is_older = written["class"] == "QuantizationRule" and "rank" in written
    return {**written, "class": "LoraRule"} if is_older else written
