"""OdmlRule: which operations of a program are quantized on the device, and how."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import quant_numerics as qn
from interception_core import check_pattern, matches_path

WEIGHT_QTYPES = ("int8", "int4", "int2")
OUTPUT_QTYPES = ("int8", "int16")
INPUT_QTYPES = ("int8",)
TILE_SIZES = (32, 64, 128, 256)
"""What LiteRT's format of blocks has. XNNPACK's kernel takes multiples of 32."""
MOST_STEPS = 128
"""Loops of more steps have one static range for all of them, unless their rule says otherwise."""


@dataclass(frozen=True, kw_only=True)
class OdmlRule:
    """What to do with the operations that it matches. Of several rules, the first match counts.

    Field names are those of Qwix's QuantizationRule, and so is their meaning on the device, but for
    Qwix's ``act_qtype``, whose two meanings have a name each. Three modes follow from the fields:

    - static range: ``output_qtype``: inputs and outputs are integers, with ranges from training or
      calibration.
    - dynamic range: ``input_qtype="int8"``: the device finds the range of each input of a
      contraction as it runs; for contractions of parameters alone.
    - weight only: neither: parameters are stored as integers and multiplied as floats.

    Attributes:
        module_path: regular expression that must match the whole module path.
        op_names: names out of ``OP_NAMES``; None or empty for all.
        weight_qtype: format of the parameters that an operation multiplies with: ``"int8"``,
            ``"int4"``, ``"int2"`` or None: per channel, symmetric, with the narrow range
            (-127 to 127).
        output_qtype: format of outputs, with a static range: ``"int8"`` (with a zero point),
            ``"int16"`` (symmetric) or None.
        input_qtype: format of inputs, with a dynamic range: ``"int8"`` or None.
        tile_size: how many values along the contracted axis share a scale: 32, 64, 128 or 256, of
            ``"int4"`` parameters of matmuls with a dynamic range, and of ``"int4"`` or ``"int2"``
            tables along their rows. None is one scale per channel, or per row.
        weight_calibration_method: as in ``quant_numerics.calibrate``; symmetric.
        act_calibration_method: the same. None is ``"minmax"``.
        act_batch_axes: axes of which the mean of the ranges is taken; the extremes are taken
            over the others. None is the first axis in training, as Qwix's, and none in
            calibration: of few batches, the mean of each example's extremes cuts off too much.
        static_range: whether the steps of a loop have a range each (``"step"``), as in the file,
            where scans are written out; or one that holds those of all (``"joined"``). None is a
            range for each step of at most ``MOST_STEPS``. Loops whose number of steps only a run
            can tell have joined ranges.
        reason: why there is this rule: plans and reports say it of operations that stay float.

    Raises:
        ValueError: a field has a value that is not allowed; names the field.
    """

    module_path: str = ".*"
    op_names: Collection[str] | None = None
    weight_qtype: Any = None
    output_qtype: Any = None
    input_qtype: Any = None
    tile_size: int | None = None
    weight_calibration_method: str = "absmax"
    act_calibration_method: str | None = None
    act_batch_axes: Collection[int] | None = None
    static_range: Literal["step", "joined"] | None = None
    reason: str | None = None

    def __new__(cls, **fields: Any) -> OdmlRule:
        """Refuse the fields of Qwix that mean two things here."""
        if not {"act_qtype", "act_static_scale"}.isdisjoint(fields):
            raise TypeError(
                "An OdmlRule has output_qtype for integer outputs, with ranges that are measured "
                "before, or input_qtype for inputs whose range the device finds, instead of "
                "act_qtype and act_static_scale. Write for example OdmlRule(weight_qtype='int8', "
                "output_qtype='int8')."
            )
        return super().__new__(cls)

    def __post_init__(self):
        from ..capture.ops import OP_NAMES

        try:
            check_pattern(self.module_path)
        except (ValueError, TypeError) as error:
            raise self._error("module_path", f"a regular expression ({error})") from error
        names = self.op_names
        if names is not None and (
            isinstance(names, str)
            or not isinstance(names, Collection)
            or not set(names) <= OP_NAMES
        ):
            allowed = f"None or a sequence of names out of {', '.join(sorted(OP_NAMES))}"
            raise self._error("op_names", allowed)
        self._set("op_names", tuple(sorted(names)) if names else None)
        self._set("weight_qtype", self._qtype("weight_qtype", WEIGHT_QTYPES))
        self._set("output_qtype", self._qtype("output_qtype", OUTPUT_QTYPES))
        self._set("input_qtype", self._qtype("input_qtype", INPUT_QTYPES))
        if self.output_qtype is not None and self.input_qtype is not None:
            raise self._error("input_qtype", "None where output_qtype, which is for inputs, too, "
                              "is set")  # fmt: skip
        self._tile_size()
        if self.static_range not in (None, "step", "joined"):
            raise self._error("static_range", "None, 'step' or 'joined'")
        if self.static_range is not None and not self.is_static:
            raise self._error("static_range", "None where outputs have no static range")
        if self.input_qtype is not None and self.weight_qtype is None:
            raise self._error("input_qtype", "None where weight_qtype is None: the device finds "
                              "ranges only for contractions of quantized parameters")  # fmt: skip
        for field in ("weight_calibration_method", "act_calibration_method"):
            self._method(field)
        axes = self.act_batch_axes
        if axes is None:
            return
        is_several = isinstance(axes, Collection) and not isinstance(axes, str)
        if not is_several or not all(type(axis) is int for axis in axes):
            raise self._error("act_batch_axes", "None or a sequence of axes")
        self._set("act_batch_axes", tuple(axes))

    def matches(self, names: Iterable[str], module_path: str) -> bool:
        """Return whether the rule is for an operation with these names."""
        if self.op_names is not None and not set(names) & set(self.op_names):
            return False
        return matches_path(self.module_path, module_path)

    @property
    def is_static(self) -> bool:
        """Whether outputs have a static range."""
        return self.output_qtype is not None

    @property
    def is_dynamic(self) -> bool:
        """Whether the device finds the ranges."""
        return self.input_qtype is not None

    @property
    def act_method(self) -> str:
        """The calibration method of activations: of int16 always symmetric."""
        method = self.act_calibration_method or "minmax"
        return method.replace("minmax", "absmax") if self.output_qtype == "int16" else method

    def __str__(self) -> str:
        bits = {"int8": "8", "int4": "4", "int2": "2", "int16": "16"}
        weight = f"W{bits[self.weight_qtype]}" if self.weight_qtype else ""
        weight += f"/{self.tile_size}" if self.tile_size else ""
        acts = self.output_qtype or self.input_qtype
        act = f"A{bits[acts]}" if acts else ""
        mode = " static" if self.is_static else " dynamic" if self.is_dynamic else " weight-only"
        return f"{weight}{act}{mode}" if weight or act else "float"

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    def _qtype(self, field: str, allowed: Sequence[str]) -> str | None:
        value = getattr(self, field)
        if value is None:
            return None
        try:
            name = qn.get_qtype(value).name
        except (TypeError, ValueError):
            name = None
        if name not in allowed:
            raise self._error(field, f"None or one of {', '.join(allowed)}")
        return name

    def _tile_size(self) -> None:
        if self.tile_size is None:
            return
        if type(self.tile_size) is not int or self.tile_size not in TILE_SIZES:
            raise self._error("tile_size", f"None or one of {', '.join(map(str, TILE_SIZES))}")
        if self.weight_qtype not in ("int4", "int2"):
            raise self._error("tile_size", "None where weight_qtype is not 'int4' or 'int2': "
                              "LiteRT has no other blocks")  # fmt: skip
        if self.is_static:
            raise self._error("tile_size", "None where output_qtype is set: LiteRT multiplies "
                              "blocks with a dynamic range alone, input_qtype='int8'")  # fmt: skip

    def _method(self, field: str) -> None:
        value = getattr(self, field)
        if value is None and field == "act_calibration_method":
            return
        try:
            method = qn.parse_calibration_method(value)
        except (TypeError, ValueError, AttributeError) as error:
            raise self._error(field, f"a calibration method. {error}") from error
        if field == "act_calibration_method" and method.name == "balanced":
            raise self._error(field, "another method than 'balanced', which rounds weights")
        if field == "weight_calibration_method" and not method.is_symmetric:
            raise self._error(field, "symmetric: LiteRT's weights have no zero point")
        if method.name == "balanced" and self.tile_size is not None:
            raise self._error(field, "another method than 'balanced' where tile_size is set: "
                              "values of blocks are rounded to nearest")  # fmt: skip

    def _error(self, field: str, allowed: str) -> ValueError:
        return ValueError(f"OdmlRule.{field} must be {allowed}, got {getattr(self, field)!r}.")


INT8 = OdmlRule(weight_qtype="int8", output_qtype="int8")


def as_rules(rules: OdmlRule | Iterable[OdmlRule]) -> tuple[OdmlRule, ...]:
    """Return one rule or several as a tuple.

    Raises:
        TypeError: something else is among them.
    """
    several = isinstance(rules, Iterable) and not isinstance(rules, str)
    rules = tuple(rules) if several else (rules,)
    for rule in rules:
        if not isinstance(rule, OdmlRule):
            raise TypeError(
                f"rules must be OdmlRule objects, got {rule!r}. Write for example "
                "OdmlRule(weight_qtype='int8', output_qtype='int8')."
            )
    return rules
