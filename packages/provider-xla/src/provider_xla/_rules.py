"""Quantization rules: which operations are quantized, and how."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import quant_numerics as qn

OP_NAMES = (
    "conv_general_dilated",
    "dot",
    "dot_general",
    "einsum",
    "matmul",
    "ragged_dot",
    "ragged_dot_general",
    "take",
)
"""The operations that rules can name."""

NAMED_ONLY = frozenset({"take"})
"""Those that only a rule which names them is about: a lookup multiplies nothing."""

FUSED_NAMES = ("attention", "gelu", "layer_norm", "rms_norm", "silu", "softmax")
"""The functions that a rule with ``kernel="fused"`` is about, too, and rules can name."""


@dataclass(frozen=True, kw_only=True)
class QuantizationRule:
    """What to do with the operations that it matches. Of several rules, the first match counts.

    Field names and meaning are Qwix's; differences are listed in docs/quantization.md.

    Attributes:
        module_path: regular expression that must match the whole module path (the name scopes
            around the operation, joined by ``/``; a Flax module's path). Character classes are
            those of ASCII.
        op_names: names out of ``OP_NAMES`` and ``FUSED_NAMES``; None or empty for all products,
            and with a `kernel` for all of ``FUSED_NAMES``. A rule must name ``take``.
        weight_qtype: qtype of an operand that is a parameter; None leaves it float. A name or a
            dtype, such as ``"int4"`` or ``jnp.int4``.
        act_qtype: qtype of every other operand; None leaves it float.
        tile_size: elements that share a scale along the contracted axis (subchannel), or, as a
            float, one over the number of tiles; None for one scale per channel. For matrix
            products only.
        act_static_scale: whether activations have scales that were measured before (static
            range) instead of their own (dynamic range). None is False.
        weight_calibration_method: how the range of a parameter is found: ``"absmax"``,
            ``"minmax"``, ``"rms,7"``, ``"fixed,-1,1"``, ``"percentile,99.9"``, ``"mse"``; see
            ``quant_numerics.calibrate``.
        act_calibration_method: the same for activations. None is ``"absmax"``.
        act_batch_axes: axes of which the mean of the static ranges is taken; the maximum is
            taken over the others.
        kernel: ``"fused"`` to compute softmax, attention, norms and activations by the kernels of
            an installed package such as te-ffi-kernels, in one pass each; they stay float. None
            leaves them to XLA. It has no say in products: a rule without qtypes and without
            `op_names` isn't about these.

    Raises:
        ValueError: a field has a value that is not allowed; names the field.
    """

    module_path: str = ".*"
    op_names: Collection[str] | None = None
    weight_qtype: Any = None
    act_qtype: Any = None
    tile_size: int | float | None = None
    act_static_scale: bool | None = None
    weight_calibration_method: str = "absmax"
    act_calibration_method: str | None = None
    act_batch_axes: Collection[int] = (0,)
    kernel: Literal["fused"] | None = None

    def __post_init__(self):
        if not isinstance(self.module_path, str):
            raise self._error("module_path", "a regular expression")
        try:
            re.compile(self.module_path, re.ASCII)
        except re.error as error:
            raise self._error("module_path", f"a regular expression ({error})") from error
        names = self.op_names
        if isinstance(names, str) or not set(names or ()) <= {*OP_NAMES, *FUSED_NAMES}:
            allowed = f"None or a sequence of names out of {', '.join(OP_NAMES + FUSED_NAMES)}"
            raise self._error("op_names", allowed)
        self._set("op_names", tuple(sorted(names)) if names else None)
        for field in self._qtypes():
            self._set(field, self._qtype(field))
        for field in self._methods():
            self._check_method(field)
        self._check_tile("tile_size")
        if self.act_static_scale is not None and self.act_qtype is None:
            raise self._error("act_static_scale", "None where act_qtype is None")
        self._set("act_batch_axes", self._integers("act_batch_axes"))
        if self.kernel not in (None, "fused"):
            raise self._error("kernel", "None or 'fused'")

    def matches(self, op_name: str, module_path: str) -> bool:
        """Returns whether the rule is for this operation."""
        if self.op_names is not None:
            named = op_name in self.op_names
        elif op_name in FUSED_NAMES:
            named = self.kernel is not None
        else:
            quantizes = self.weight_qtype is not None or self.act_qtype is not None
            named = op_name not in NAMED_ONLY and (self.kernel is None or quantizes)
        # ASCII, as the automata that decide which paths share a trace have it (see _paths).
        return named and re.fullmatch(self.module_path, module_path, re.ASCII) is not None

    @property
    def act_method(self) -> str:
        """``act_calibration_method``, or its default."""
        return self.act_calibration_method or "absmax"

    def _qtypes(self) -> Sequence[str]:
        """Returns the fields that hold a qtype."""
        return ("weight_qtype", "act_qtype")

    def _methods(self) -> Sequence[str]:
        """Returns the fields that hold a calibration method."""
        return ("weight_calibration_method", "act_calibration_method")

    def _set(self, field: str, value: Any) -> None:
        object.__setattr__(self, field, value)

    def _qtype(self, field: str) -> str | None:
        value = getattr(self, field)
        if value is None:
            return None
        try:
            return qn.get_qtype(value).name
        except (TypeError, ValueError) as error:
            raise self._error(field, f"None or a qtype. {error}") from error

    def _check_method(self, field: str) -> None:
        value = getattr(self, field)
        if value is None and field == "act_calibration_method":
            return
        try:
            qn.parse_calibration_method(value)
        except (TypeError, ValueError, AttributeError) as error:
            raise self._error(field, f"a calibration method. {error}") from error

    def _check_tile(self, field: str) -> None:
        tile = getattr(self, field)
        if tile is None:
            return
        if isinstance(tile, float) and 0 < tile <= 1 and abs(1 / tile - round(1 / tile)) < 1e-6:
            return
        if not isinstance(tile, int) or isinstance(tile, bool) or tile < 1:
            allowed = "None, a positive number of elements, or one over a number of tiles"
            raise self._error(field, allowed)

    def _integers(self, field: str) -> tuple[int, ...]:
        value = getattr(self, field)
        if isinstance(value, str) or not all(
            isinstance(axis, int) and not isinstance(axis, bool) for axis in value
        ):
            raise self._error(field, "a sequence of axes")
        return tuple(value)

    def _error(self, field: str, allowed: str) -> ValueError:
        given = getattr(self, field)
        name = type(self).__name__
        return ValueError(f"{name}.{field} must be {allowed.rstrip('.')}. Got {given!r}.")


@dataclass(frozen=True, kw_only=True)
class QtRule(QuantizationRule):
    """A rule for quantized training; a plain QuantizationRule is one with these defaults.

    Attributes:
        bwd_qtype: qtype of the incoming gradient in the two products of the backward pass; None
            leaves the backward pass float, at the unquantized operands (straight through).
        bwd_calibration_method: how the range of that gradient is found.
        bwd_weight_grad_tile_size: elements that share a scale along the axis that is contracted
            for the gradient of a parameter; as ``tile_size``.
        disable_channelwise_axes: one scale for all of an operand (but for tiles), forward and
            backward.
        bwd_stochastic_rounding: ``"uniform"`` or ``"low_bit_uniform"`` noise when the gradient is
            rounded; None rounds to nearest. Needs ``quant_key`` in the call.
        channelwise_noise_axes: axes of the gradient along which the noise differs.
    """

    bwd_qtype: Any = None
    bwd_calibration_method: str = "absmax"
    bwd_weight_grad_tile_size: int | float | None = None
    disable_channelwise_axes: bool = False
    bwd_stochastic_rounding: Literal["uniform", "low_bit_uniform"] | None = None
    channelwise_noise_axes: Sequence[int] = (0,)

    def __post_init__(self):
        super().__post_init__()
        self._check_tile("bwd_weight_grad_tile_size")
        if self.bwd_stochastic_rounding not in (None, "uniform", "low_bit_uniform"):
            raise self._error("bwd_stochastic_rounding", "None, 'uniform' or 'low_bit_uniform'")
        self._set("channelwise_noise_axes", self._integers("channelwise_noise_axes"))

    def _qtypes(self) -> Sequence[str]:
        return (*super()._qtypes(), "bwd_qtype")

    def _methods(self) -> Sequence[str]:
        return (*super()._methods(), "bwd_calibration_method")

    @classmethod
    def of(cls, rule: QuantizationRule) -> QtRule:
        """Returns ``rule`` as a QtRule."""
        if isinstance(rule, cls):
            return rule
        return cls(**{field.name: getattr(rule, field.name) for field in fields(rule)})
