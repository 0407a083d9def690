"""Quantization rules: which operations are quantized, and how."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import quant_numerics as qn

OP_NAMES = ("conv_general_dilated", "dot", "dot_general", "einsum", "matmul")
"""The operations that rules can name."""


@dataclass(frozen=True, kw_only=True)
class QuantizationRule:
    """What to do with the operations that it matches. Of several rules, the first match counts.

    Field names and meaning are Qwix's.

    Attributes:
        module_path: regular expression that must match the whole module path (the name scopes
            around the operation, joined by ``/``; a Flax module's path). Character classes are
            those of ASCII.
        op_names: names out of ``OP_NAMES``; None for all of them.
        weight_qtype: qtype of an operand that is a parameter; None leaves it float.
        act_qtype: qtype of every other operand; None leaves it float.
        tile_size: elements that share a scale along the contracted axis (subchannel); None for
            one scale per channel. For matrix products only.

    Raises:
        ValueError: a field has a value that is not allowed; names the field.
    """

    module_path: str = ".*"
    op_names: Sequence[str] | None = None
    weight_qtype: str | None = None
    act_qtype: str | None = None
    tile_size: int | None = None

    def __post_init__(self):
        if not isinstance(self.module_path, str):
            raise ValueError(_field("module_path", self.module_path, "a regular expression"))
        try:
            re.compile(self.module_path, re.ASCII)
        except re.error as error:
            allowed = f"a regular expression ({error})"
            raise ValueError(_field("module_path", self.module_path, allowed)) from error
        if self.op_names is not None:
            names = self.op_names
            if isinstance(names, str) or not names or not set(names) <= set(OP_NAMES):
                allowed = f"None or a sequence of names out of {', '.join(OP_NAMES)}"
                raise ValueError(_field("op_names", names, allowed))
            object.__setattr__(self, "op_names", tuple(names))
        for field in ("weight_qtype", "act_qtype"):
            value = getattr(self, field)
            if value is None:
                continue
            try:
                qn.get_qtype(value)
            except (TypeError, ValueError) as error:
                raise ValueError(_field(field, value, f"None or a qtype. {error}")) from error
        tile = self.tile_size
        if tile is not None and (not isinstance(tile, int) or isinstance(tile, bool) or tile < 1):
            raise ValueError(_field("tile_size", tile, "None or a positive number of elements"))

    def matches(self, op_name: str, module_path: str) -> bool:
        """Returns whether the rule is for this operation."""
        named = self.op_names is None or op_name in self.op_names
        # ASCII, as the automata that decide which paths share a trace have it (see _paths).
        return named and re.fullmatch(self.module_path, module_path, re.ASCII) is not None


def _field(name: str, given: object, allowed: str) -> str:
    return f"QuantizationRule.{name} must be {allowed.rstrip('.')}. Got {given!r}."
