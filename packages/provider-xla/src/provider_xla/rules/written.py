"""Rules as people write them: ``Rule("mlp/.*", weight=Q("int4", tile=32))``, Qwix's, or presets."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import re
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import quant_numerics as qn

from ..errors import QuantizationError
from ..extras import MissingExtraError, feature
from .qt_rule import QtRule
from .rule import ANY_PATH, QuantizationRule


def is_qwix(rule: Any) -> bool:
    """Return whether an object is a rule of Qwix."""
    kinds = type(rule).__mro__
    is_theirs = any(kind.__module__.partition(".")[0] == "qwix" for kind in kinds)
    return is_theirs and dataclasses.is_dataclass(rule)


def of_qwix(rule: Any) -> QuantizationRule:
    """Return a rule of Qwix as a ``QuantizationRule``, ``QtRule`` or ``LoraRule``.

    Fields have the same names and meaning, but that Qwix also quantizes matmuls of two activations
    if the rule has no ``op_names``, and that ``"dot_general"`` is what ``@``, ``jnp.matmul`` and
    ``jnp.dot`` come down to.

    Raises:
        ValueError: it has a field that rules do not have here; names the field.
        MissingExtraError: it is a ``LoraRule``, and provider-xla-lora is not installed.
    """
    # What Qwix has by default may be written differently here, and is the default here, too.
    given = {
        field.name: value
        for field in dataclasses.fields(rule)
        if (value := getattr(rule, field.name)) != _default(field)
    }
    kinds: Any = (feature("rule-lora"),) if "rank" in given else (QuantizationRule, QtRule)
    known = [{field.name for field in dataclasses.fields(kind)} for kind in kinds]
    kind = next((one for one, own in zip(kinds, known, strict=True) if given.keys() <= own), None)
    if kind is None:
        names, last = ", ".join(sorted(given.keys() - known[-1])), kinds[-1].__name__
        raise ValueError(
            f"A rule of Qwix must have fields that {last} has, got {names}. Write it as a {last}: "
            "docs/quantization.md lists what differs."
        )
    return kind(**in_qwix_words(given))


def in_qwix_words(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of a rule here for those of one of Qwix, with the meaning there."""
    found = dict(given)
    if "dot_general" in (found.get("op_names") or ()):
        found["op_names"] = {*found["op_names"], "dot", "matmul"}
    if found.get("act_qtype") is not None and not found.get("op_names"):
        found["weights_only"] = False
    return found


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default_factory is not dataclasses.MISSING:
        return field.default_factory()
    return field.default


QWIX_NAMES = (
    "module_path",
    "op_names",
    "weight_qtype",
    "act_qtype",
    "tile_size",
    "act_static_scale",
    "weight_calibration_method",
    "act_calibration_method",
    "act_batch_axes",
)
"""The fields of Qwix's rule."""


@dataclasses.dataclass(frozen=True)
class Q:
    """A format, with its scales.

    Attributes:
        qtype: a name or a dtype, such as ``"int4"`` or ``jnp.int4``.
        tile: elements that share a scale along the contracted axes; None for one scale per channel.
        scales: dtype of the scales, ``"float16"`` or ``"bfloat16"``; None for the format's own.
        calibration: how the range is found; see ``quant_numerics.calibrate``.
        fallback: what to do where ``tile`` does not divide: ``"divisor"``, ``"channel"``,
            ``"padded"``, or None for an error.
    """

    qtype: Any
    tile: int | float | None = None
    scales: Any = None
    calibration: str = "absmax"
    fallback: Literal["divisor", "channel", "padded"] | None = "divisor"


@dataclasses.dataclass(frozen=True)
class Static:
    """A format of activations whose range is measured beforehand, by ``plan.calibrate``.

    Attributes:
        qtype: a name or a dtype.
        calibration: how the range of a batch is found.
        steps: ``"step"`` for a range for each step of a loop, ``"joined"`` for one of all; None
            for one for each step of short loops.
        unseen: what an operation does that no batch has reached: ``"dynamic"`` or ``"error"``.
        batch_axes: axes of which the mean of the ranges is taken.
    """

    qtype: Any
    calibration: str = "absmax"
    steps: Literal["step", "joined"] | None = None
    unseen: Literal["dynamic", "error"] = "dynamic"
    batch_axes: Collection[int] = (0,)


@dataclasses.dataclass(frozen=True)
class Gradient:
    """How incoming gradients are quantized in training.

    Attributes:
        qtype: a name or a dtype.
        calibration: how their range is found.
        tile: elements that share a scale; None for one scale per channel.
        rounding: ``"uniform"`` or ``"low_bit_uniform"`` noise; None rounds to nearest.
    """

    qtype: Any
    calibration: str = "absmax"
    tile: int | float | None = None
    rounding: Literal["uniform", "low_bit_uniform"] | None = None


def Rule(  # it reads as the class that it returns
    path: str | None = None,
    *,
    weight: Any = None,
    act: Any = None,
    gradient: Any = None,
    ops: Collection[str] | str | None = None,
    param: str | None = None,
    activations: bool | None = None,
    sparsity: str | None = None,
    lora: Any = None,
    fused: bool = False,
    **qwix: Any,
) -> QuantizationRule:
    """Return a rule. Without a format its operations stay float.

    Args:
        path: regular expression that must match the whole module path; None for all.
        weight: the format of parameters: a qtype or a ``Q``.
        act: that of activations: a qtype, or ``Static`` for a range measured beforehand.
        gradient: that of incoming gradients in training: a qtype or a ``Gradient``.
        ops: names of operations; None for all contractions.
        param: regular expression that must match the whole pytree path of a parameter; None for
            operations of any.
        activations: whether it is also for matmuls of two activations, such as attention scores;
            None for where ``ops`` names them.
        sparsity: such as ``"2:4"``.
        lora: an adapter: a rank or a ``Lora``.
        fused: whether softmax, attention, norms and activations run in kernels.
        qwix: instead of the arguments above, the fields of a rule of Qwix, with its meaning.

    Returns:
        A ``QuantizationRule``, a ``QtRule`` with a ``gradient``, or a ``LoraRule`` with ``lora``.

    Raises:
        TypeError: an argument is unknown, or both ways of writing are mixed.
        ValueError: a value is not allowed; names the rule's field.
        MissingExtraError: ``lora`` is given, and provider-xla-lora is not installed.
    """
    if qwix:
        unknown = sorted(qwix.keys() - set(QWIX_NAMES))
        ours = (path, weight, act, gradient, ops, param, activations, sparsity, lora, fused or None)
        is_mixed = any(one is not None for one in ours)
        if unknown or is_mixed:
            given = ", ".join(unknown) or f"{', '.join(sorted(qwix))} beside them"
            raise TypeError(
                "Rule takes path, weight, act, gradient, ops, param, activations, sparsity, lora "
                f"and fused, or the fields of a Qwix rule ({', '.join(QWIX_NAMES)}) alone, got "
                f"{given}."
            )
        return QuantizationRule(**in_qwix_words(qwix))
    fields: dict[str, Any] = {
        "module_path": ANY_PATH if path is None else path,
        "op_names": (ops,) if isinstance(ops, str) else ops,
        "weight_path": param,
        "sparsity": sparsity,
        "kernel": "fused" if fused else None,
        "weights_only": None if activations is None else not activations,
    }
    if weight is not None:
        weight = weight if isinstance(weight, Q) else Q(weight)
        fields |= {
            "weight_qtype": weight.qtype,
            "tile_size": weight.tile,
            "scale_dtype": weight.scales,
            "weight_calibration_method": weight.calibration,
            "tile_fallback": weight.fallback,
        }
    if isinstance(act, Static):
        fields |= {
            "act_qtype": act.qtype,
            "act_static_scale": True,
            "act_calibration_method": act.calibration,
            "static_range": act.steps,
            "unseen_range": act.unseen,
            "act_batch_axes": act.batch_axes,
        }
    elif isinstance(act, Q):
        own = act.scales is None and act.fallback == "divisor"
        if not own or act.tile not in (None, fields.get("tile_size")):
            raise TypeError(
                f"act must be in tiles of its weight, with the format's own scales, got {act}. "
                "Give act a qtype, and the tile to weight=Q(...)."
            )
        fields |= {"act_qtype": act.qtype, "act_calibration_method": act.calibration}
    elif act is not None:
        fields["act_qtype"] = act
    kind = QuantizationRule
    if lora is not None:
        kind = feature("rule-lora")
        fields |= dataclasses.asdict(lora) if dataclasses.is_dataclass(lora) else {"rank": lora}
    rule = kind(**fields)
    return rule if gradient is None else with_gradient(rule, gradient)


def with_gradient(rule: QuantizationRule, gradient: Any) -> QtRule:
    """Return a rule for training, with the format of incoming gradients: a qtype or a Gradient."""
    given = gradient if isinstance(gradient, Gradient) else Gradient(gradient)
    return dataclasses.replace(
        QtRule.of(rule),
        bwd_qtype=given.qtype,
        bwd_calibration_method=given.calibration,
        bwd_act_grad_tile_size=given.tile,
        bwd_weight_grad_tile_size=given.tile,
        bwd_stochastic_rounding=given.rounding,
    )


_BLOCKS = Q("int4", tile=32, scales="float16")


class Preset(NamedTuple):
    """A rule for all operations.

    Attributes:
        about: what it is for, in a line.
        made: the rule, or what makes it where that needs another package.
        cosine: of the embeddings of MiniLM, a sentence encoder, to those in float: the mean of 52
            sentences, as tests/test_minilm.py measures it. None where training changes it.
    """

    about: str
    made: QuantizationRule | Callable[[], QuantizationRule]
    cosine: float | None = None

    @property
    def rule(self) -> QuantizationRule:
        """The rule.

        Raises:
            MissingExtraError: it needs a package that is not installed.
        """
        return self.made if isinstance(self.made, QuantizationRule) else self.made()


PRESETS: Mapping[str, Preset] = {
    "int8": Preset("weights in int8: decoding, and models that int8 activations hurt",
                   Rule(weight="int8"), 0.999),
    "int4": Preset("weights in int4, a scale for 32: decoding", Rule(weight=_BLOCKS), 0.946),
    "w8a8": Preset("weights and activations in int8: encoders, prefill, CNNs",
                   Rule(weight="int8", act="int8"), 0.996),
    "w4a8": Preset("weights in int4, activations in int8, a scale for 32: language models",
                   Rule(weight=_BLOCKS, act="int8"), 0.946),
    "nf4": Preset("weights in nf4, a scale for 64: small files, QLoRA's base",
                  Rule(weight=Q("nf4", tile=64)), 0.963),
    "fp8": Preset("weights and activations in float8_e4m3fn: GPUs with FP8",
                  Rule(weight="float8_e4m3fn", act="float8_e4m3fn"), 0.997),
    "mxfp4": Preset("weights in mxfp4, a scale for 32", Rule(weight="mxfp4"), 0.948),
    "mxfp8": Preset("weights and activations in mxfp8, a scale for 32",
                    Rule(weight="mxfp8", act="mxfp8"), 0.994),
    "qlora": Preset("weights in nf4, and float adapters of rank 8 to train",
                    lambda: Rule(weight=Q("nf4", tile=64), lora=8)),
    "qat-w8a8": Preset("training that sees int8 weights and activations: w8a8 afterwards",
                       QtRule.of(Rule(weight="int8", act="int8"))),
    "qat-int4": Preset("training that sees int4 weights: int4 afterwards",
                       QtRule.of(Rule(weight=_BLOCKS))),
    "train-int8": Preset("training with int8 matmuls, forward and backward",
                         Rule(weight="int8", act="int8", gradient="int8")),
    "train-fp8": Preset("training with float8 matmuls, E4M3 forward and E5M2 backward",
                        Rule(weight="float8_e4m3fn", act="float8_e4m3fn", gradient="float8_e5m2")),
}  # fmt: skip
"""By name. ``"int4/64"`` is the preset with a scale for 64."""

_WITH_TILE = re.compile(r"([^/]+)/(\d+)")


def preset(name: str) -> QuantizationRule:
    """Return the rule of a preset.

    Args:
        name: one of ``PRESETS``; of those with tiles also with the number of elements that share
            a scale, such as ``"w4a8/64"``.

    Raises:
        QuantizationError: there is no such preset; gives the nearest, and all.
    """
    found = _WITH_TILE.fullmatch(name)
    base, tile = found.groups() if found else (name, None)
    known = PRESETS.get(base)
    if known is None:
        near = difflib.get_close_matches(base.lower(), PRESETS, n=1, cutoff=0.5)
        guess = f" Did you mean {near[0]!r}?" if near else ""
        raise QuantizationError(
            f"A preset must be one of {', '.join(PRESETS)}, got {name!r}.{guess} Or give rules, "
            "such as Rule(weight='int8')."
        )
    rule = known.rule
    if tile is None:
        return rule
    if rule.tile_size is None or int(tile) < 1:
        tiled = [one for one, (_, rule, _) in installed().items() if rule.tile_size is not None]
        raise QuantizationError(
            f"A number of elements per scale is for {', '.join(tiled)}, got {name!r}."
        )
    return dataclasses.replace(rule, tile_size=int(tile))


def installed() -> dict[str, tuple[str, QuantizationRule, float | None]]:
    """Return what presets do, their rules and cosines: those whose packages are installed."""
    found = {}
    for name, one in PRESETS.items():
        with contextlib.suppress(MissingExtraError):
            found[name] = one.about, one.rule, one.cosine
    return found


def is_of_feature(rule: Any) -> bool:
    """Return whether a rule is a feature's, as ``CacheRule``: its class names the feature."""
    return isinstance(getattr(type(rule), "feature", None), str)


def as_rules(given: Any) -> list[Any]:
    """Return rules: from one, a preset's name, a rule of Qwix, or several of these."""
    single = isinstance(given, (str, Mapping, QuantizationRule)) or is_qwix(given)
    single = single or is_of_feature(given) or not isinstance(given, Iterable)
    rules = []
    for rule in (given,) if single else given:
        if isinstance(rule, str):
            rules.append(preset(rule))
        elif is_qwix(rule):
            rules.append(of_qwix(rule))
        elif isinstance(rule, QuantizationRule) or is_of_feature(rule):
            rules.append(rule)
        else:
            raise TypeError(
                f"A provider takes QuantizationRules and names of presets, got {rule!r}. Write "
                "for example QuantizationRule(weight_qtype='int8', act_qtype='int8')."
            )
    return rules


def bits_of(rule: QuantizationRule) -> float:
    """Return the bits that a rule's format takes for a number of a matrix of 1,024 rows."""
    kind = qn.get_qtype(rule.weight_qtype)
    scales = kind if rule.scale_dtype is None else kind.with_scales(rule.scale_dtype)
    size = rule.tile_size or kind.block or 1024
    size = size if isinstance(size, int) else math.ceil(1024 * size)
    return kind.bits + scales.scale_dtype.itemsize * 8 / size
