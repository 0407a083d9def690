"""The rule for quantized training: how the backward pass is quantized."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal

import quant_numerics as qn

from .rule import QuantizationRule

_MEAN = qn.MovingAverage()
_GRADIENT_METHODS = (
    "bwd_calibration_method",
    "bwd_act_grad_calibration_method",
    "bwd_weight_grad_calibration_method",
)


@dataclass(frozen=True, kw_only=True)
class QtRule(QuantizationRule):
    """A rule for quantized training, with fields for the backward pass.

    A plain QuantizationRule counts as a QtRule with these fields at their defaults.

    The backward pass of a contraction of an activation and a parameter has two contractions. One
    gives the gradient of the activation, from the incoming gradient and the parameter. The other
    gives the gradient of the parameter, from the incoming gradient and the activation. Fields with
    ``bwd_act_grad_`` are for the first, those with ``bwd_weight_grad_`` for the second, and those
    with ``bwd_`` alone for both. Where both operands are activations, both are of the first kind.

    Attributes:
        bwd_qtype: qtype of the incoming gradient in the two contractions of the backward pass; None
            leaves the backward pass float, at the unquantized operands (straight through).
        bwd_act_grad_qtype: the same for the gradient of activations alone; None is `bwd_qtype`.
        bwd_weight_grad_qtype: the same for the gradient of parameters alone; None is `bwd_qtype`.
        bwd_calibration_method: how the range of that gradient is found.
        bwd_act_grad_calibration_method: the same for the gradient of activations alone; None is
            `bwd_calibration_method`.
        bwd_weight_grad_calibration_method: the same for the gradient of parameters alone.
        bwd_act_grad_tile_size: elements that share a scale along the axis that is contracted for
            the gradient of an activation (the output channels); as ``tile_size``.
        bwd_weight_grad_tile_size: the same for the gradient of a parameter (batch and sequence).
        bwd_original_residuals: whether the other operand of both contractions is the unquantized
            one, instead of the quantized values of the forward pass. None is for a gradient that is
            not quantized alone. With False, a float gradient is that at the quantized values:
            these are saved for it, and gathered from devices, and the float operands are not.
        bwd_act_residual_qtype: qtype that an activation is quantized to again for the gradient of
            its parameter, whatever it had in the forward pass; None for none.
        bwd_weight_residual_qtype: qtype that a parameter is quantized to again for the gradient of
            its activation; None for none.
        bwd_residual_calibration_method: how the ranges of these are found.
        weight_static_scale: whether parameters have one scale that follows from `static_average`,
            instead of those of the step; in training, while inference stores them by their own.
        bwd_static_scale: the same for the incoming gradient, which then has one scale in both
            contractions. It needs an ``AmaxHistory``.
        static_average: how the static ranges follow from those of the steps: a
            ``quant_numerics.MovingAverage`` with the step's own, or a
            ``quant_numerics.AmaxHistory``, delayed scaling, for float8: from the steps before.
        disable_channelwise_axes: one scale for all of an operand (but for tiles), forward and
            backward.
        bwd_stochastic_rounding: ``"uniform"`` or ``"low_bit_uniform"`` noise when the gradient is
            rounded; None rounds to nearest. Needs ``quant_key`` in the call.
        channelwise_noise_axes: axes of the gradient along which the noise differs.
    """

    bwd_qtype: Any = None
    bwd_act_grad_qtype: Any = None
    bwd_weight_grad_qtype: Any = None
    bwd_calibration_method: str = "absmax"
    bwd_act_grad_calibration_method: str | None = None
    bwd_weight_grad_calibration_method: str | None = None
    bwd_act_grad_tile_size: int | float | None = None
    bwd_weight_grad_tile_size: int | float | None = None
    bwd_original_residuals: bool | None = None
    bwd_act_residual_qtype: Any = None
    bwd_weight_residual_qtype: Any = None
    bwd_residual_calibration_method: str = "absmax"
    weight_static_scale: bool = False
    bwd_static_scale: bool = False
    static_average: qn.MovingAverage | qn.AmaxHistory = _MEAN
    disable_channelwise_axes: bool = False
    bwd_stochastic_rounding: Literal["uniform", "low_bit_uniform"] | None = None
    channelwise_noise_axes: Sequence[int] = (0,)

    def __post_init__(self):
        super().__post_init__()
        dense = "a rule trains: training keeps parameters dense, PtqProvider makes them sparse"
        self._check_unset("sparsity", True, dense)
        self._check_choice("bwd_stochastic_rounding", None, "uniform", "low_bit_uniform")
        self._set("channelwise_noise_axes", self._integers("channelwise_noise_axes"))
        self._check_backward()
        self._check_static()

    @property
    def is_static(self) -> bool:
        """Return whether anything has a static range, in training."""
        return super().is_static or self.weight_static_scale or self.bwd_static_scale

    def backward(self, of_weight: bool) -> qn.Backward | None:
        """Return how the contraction that gives a gradient is quantized.

        Args:
            of_weight: whether it is the gradient of a parameter.
        """
        kind = "weight" if of_weight else "act"
        qtype = self.backward_qtype(of_weight)
        if qtype is None:
            return qn.Backward(None) if self.bwd_original_residuals is False else None
        # The incoming gradient is multiplied with the operand of the other kind.
        again = self.bwd_act_residual_qtype if of_weight else self.bwd_weight_residual_qtype
        residual: Any = "original" if self.bwd_original_residuals else None
        tile = getattr(self, f"bwd_{kind}_grad_tile_size")
        if again is not None:
            own = tile if qn.get_qtype(again).block is None else None
            method = self.bwd_residual_calibration_method
            residual = qn.HowToQuantize(again, own, method, not self.disable_channelwise_axes)
        return qn.Backward(
            qtype,
            getattr(self, f"bwd_{kind}_grad_calibration_method") or self.bwd_calibration_method,
            tile,
            not self.disable_channelwise_axes,
            self.bwd_stochastic_rounding,
            tuple(self.channelwise_noise_axes),
            residual,
        )

    def _check_backward(self) -> None:
        of = {"act": self.backward_qtype(False), "weight": self.backward_qtype(True)}
        for kind, qtype in of.items():
            self._check_tile(f"bwd_{kind}_grad_tile_size")
            names = [f"bwd_{kind}_grad_tile_size", f"bwd_{kind}_grad_calibration_method"]
            other = "act" if kind == "weight" else "weight"
            for name in (*names, f"bwd_{other}_residual_qtype"):
                where = f"neither bwd_qtype nor bwd_{kind}_grad_qtype is given"
                self._check_unset(name, qtype is None, where)
        for name in ("weight_static_scale", "bwd_static_scale"):
            self._check_choice(name, True, False)
        balances = qn.parse_calibration_method(self.weight_calibration_method).name == "balanced"
        where = "weight_calibration_method is 'balanced': a scale that is given only rounds"
        self._check_unset("weight_static_scale", balances, where)
        self._check_choice("bwd_original_residuals", None, True, False)
        without = of == {"act": None, "weight": None} and bool(self.bwd_original_residuals)
        where = "no bwd_qtype is given: a float backward pass has them"
        self._check_unset("bwd_original_residuals", without, where)
        for name in _GRADIENT_METHODS:
            method = getattr(self, name)
            if method is not None and not qn.parse_calibration_method(method).is_symmetric:
                raise self._error(name, "a symmetric method, such as 'absmax' or 'rms,7'")

    def _check_static(self) -> None:
        average = self.static_average
        if not isinstance(average, qn.MovingAverage | qn.AmaxHistory):
            raise self._error("static_average", "a quant_numerics.MovingAverage or AmaxHistory")
        if average != _MEAN and not self.is_static:
            raise self._error(
                "static_average",
                "left out where neither act_static_scale, weight_static_scale nor "
                "bwd_static_scale is True",
            )
        without = self.weight_qtype is None
        self._check_unset("weight_static_scale", without, "weight_qtype is None")
        gradients = [self.backward_qtype(False), self.backward_qtype(True)]
        if self.bwd_static_scale:
            self._check_static_gradient(gradients)
        if not isinstance(average, qn.AmaxHistory):
            return
        static: dict[str, list[str | None]] = {
            "act_qtype": [self.act_qtype] if self.act_static_scale else [],
            "weight_qtype": [self.weight_qtype] if self.weight_static_scale else [],
            "bwd_qtype": gradients if self.bwd_static_scale else [],
        }
        for field, qtypes in static.items():
            kinds = [qn.get_qtype(qtype) for qtype in qtypes if qtype is not None]
            if any(kind.kind != "float" or kind.bits != 8 or kind.block for kind in kinds):
                raise self._error(
                    field,
                    "'float8_e4m3fn' or 'float8_e5m2' where its scales follow from an AmaxHistory: "
                    "others have too few digits for the scale 1 of the first step. Use a "
                    "MovingAverage for these",
                )
        methods = {
            "act_calibration_method": self.act_static_scale and self.act_method,
            "weight_calibration_method": self.weight_static_scale
            and self.weight_calibration_method,
        }
        for field, method in methods.items():
            if method and method != "absmax":
                raise self._error(field, "'absmax' where its scales follow from an AmaxHistory")

    def _check_static_gradient(self, qtypes: Sequence[str | None]) -> None:
        self._check_unset("bwd_static_scale", qtypes == [None, None], "no bwd_qtype is given")
        if not isinstance(self.static_average, qn.AmaxHistory):
            raise self._error(
                "static_average",
                "a quant_numerics.AmaxHistory where bwd_static_scale is True: the range of a "
                "gradient is known after it is quantized",
            )
        for kind in ("act", "weight"):
            self._check_unset(f"bwd_{kind}_grad_tile_size", True, "bwd_static_scale is True")
        for field in _GRADIENT_METHODS:
            if getattr(self, field) not in (None, "absmax"):
                raise self._error(field, "'absmax' where bwd_static_scale is True")

    def backward_qtype(self, of_weight: bool) -> str | None:
        """Return the incoming gradient's qtype in one of both contractions."""
        own = self.bwd_weight_grad_qtype if of_weight else self.bwd_act_grad_qtype
        return own or self.bwd_qtype

    def _qtypes(self) -> Sequence[str]:
        own = ("bwd_qtype", "bwd_act_grad_qtype", "bwd_weight_grad_qtype")
        residuals = ("bwd_act_residual_qtype", "bwd_weight_residual_qtype")
        return (*super()._qtypes(), *own, *residuals)

    def _methods(self) -> Sequence[str]:
        return (*super()._methods(), "bwd_residual_calibration_method", *_GRADIENT_METHODS)

    @classmethod
    def of(cls, rule: QuantizationRule) -> QtRule:
        """Return ``rule`` as a QtRule.

        Raises:
            ValueError: the rule gives parameters adapters.
        """
        if isinstance(rule, cls):
            return rule
        if rule.adapts:
            raise ValueError(
                "A rule for training must have no adapters: they are trained beside parameters "
                "that stay as they are. Use PtqProvider(rules), for plan(...) or "
                f"quantize_model(...). Got {rule!r}."
            )
        return cls(**{field.name: getattr(rule, field.name) for field in fields(rule)})
