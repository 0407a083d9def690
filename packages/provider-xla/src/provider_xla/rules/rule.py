"""Quantization rules: which operations are quantized, and how.

Also N:M sparsity: n of each m consecutive elements stay, others are zero.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal, NamedTuple

import jax
import jax.numpy as jnp

import quant_numerics as qn
from interception_core import FeatureSpec, check_pattern, declared_specs, matches_path


class Pattern(NamedTuple):
    """N:M, as ``"2:4"``: at most ``n`` of ``m`` consecutive elements are nonzero."""

    n: int
    m: int

    def __str__(self) -> str:
        return f"{self.n}:{self.m}"


class Sparsity(NamedTuple):
    """Which elements of a parameter are zeros: a pattern along one axis."""

    pattern: Pattern
    axis: int


def parse_sparsity(text: str) -> Pattern:
    """Read a pattern such as ``"2:4"``.

    Raises:
        ValueError: ``text`` is not N:M with 0 < N < M.
    """
    found = re.fullmatch(r"(\d+):(\d+)", text, re.ASCII) if isinstance(text, str) else None
    if found is None or not 0 < int(found[1]) < int(found[2]):
        raise ValueError("'N:M' with 0 < N < M, such as '2:4'")
    return Pattern(int(found[1]), int(found[2]))


def kept(score: jax.Array, pattern: Pattern, axis: int) -> jax.Array:
    """Return which elements stay: the n largest scores of each m.

    Of equal scores the first one stays (arXiv:2104.08378, section 3.1, where scores are
    magnitudes).

    Args:
        score: float; m divides the axis.
        pattern: N:M.
        axis: of ``score``.

    Returns:
        bool, of the shape of ``score``.
    """
    moved = jnp.moveaxis(score, axis, -1)
    groups = moved.reshape(*moved.shape[:-1], -1, pattern.m)
    # The rank of each in its group, from the largest.
    ranks = jnp.argsort(jnp.argsort(-groups, axis=-1, stable=True), axis=-1, stable=True)
    return jnp.moveaxis((ranks < pattern.n).reshape(moved.shape), -1, axis)


def sparsified(w: jax.Array, sparsity: Sparsity) -> jax.Array:
    """Return an array with zeros instead of its smaller magnitudes."""
    keep = kept(jnp.abs(w), sparsity.pattern, sparsity.axis)
    return jnp.where(keep, w, jnp.zeros((), w.dtype))


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
"""Operations that a rule must name: a lookup multiplies nothing."""

FUSED_NAMES = ("attention", "gelu", "layer_norm", "rms_norm", "silu", "softmax")
"""Further names for rules: the functions that a rule with ``kernel="fused"`` is about.

Plugins add names by features, such as ``fused-entmax``.
"""

FUSED = "fused-"
"""What the name of a feature with fused functions begins with."""

ANY_PATH = ".*"
"""The regular expression of every module path."""

MOST_STEPS = 128
"""Loops of more steps have one static range for all of them, unless their rule says otherwise."""


def is_fused(op_name: str) -> bool:
    """Return whether an operation is a function that rules with ``kernel="fused"`` match."""
    if op_name in OP_NAMES:
        return False
    return op_name in FUSED_NAMES or any(
        spec.name == f"{FUSED}{op_name}" for spec in declared_specs(FeatureSpec)
    )


def _is_known(op_name: Any) -> bool:
    return isinstance(op_name, str) and (op_name in OP_NAMES or is_fused(op_name))


class Adaptable(NamedTuple):
    """A parameter for which a rule asks for an adapter, as the program uses it.

    Attributes:
        shape: of the parameter.
        lead: its axes that hold a separate matrix for each index: steps of a loop, groups, batch
            axes.
        contracted: its axes that the first contraction sums over, or that a lookup indexes.
        kept: its other axes.
        stepped: those of ``lead`` that loops step along.
        is_lookup: whether it is only looked up.
    """

    shape: tuple[int, ...]
    lead: tuple[int, ...]
    contracted: tuple[int, ...]
    kept: tuple[int, ...]
    stepped: tuple[int, ...]
    is_lookup: bool


@dataclass(frozen=True, kw_only=True)
class QuantizationRule:
    r"""What to do with matching operations. The first matching rule counts.

    Field names and meaning are Qwix's; differences are listed in docs/quantization.md.

    Attributes:
        module_path: regular expression that must match the whole module path (the name scopes
            around the operation, joined by ``/``; a Flax module's path). Character classes are
            those of ASCII.
        weight_path: regular expression that must match the whole pytree path of a parameter among
            the operands, below the argument that holds the parameters: ``r"\['layers'\]\[3\].*"``
            for what a plan shows as ``args[0]['layers'][3]['up']``. The rule is then only about
            contractions and lookups of such a parameter, or of a weight that is computed from it.
            None is for all operations.
        op_names: names out of ``OP_NAMES`` and ``FUSED_NAMES``; None or empty for all contractions,
            and with a `kernel` for all of ``FUSED_NAMES``. A rule must name ``take``.
        weight_qtype: qtype of an operand that is a parameter; None leaves it float. A name or a
            dtype, such as ``"int4"`` or ``jnp.int4``.
        act_qtype: qtype of every other operand; None leaves it float.
        tile_size: elements that share a scale along the contracted axes (subchannel), as if they
            were one, or, as a float, one over the number of tiles; None for one scale per channel.
            Convolutions of quantized activations have one scale per channel, but for those with
            a window of one element, which are matmuls. ``plan.notes`` says so.
        tile_fallback: what to do if `tile_size` does not divide an operation's contracted axes:
            ``"divisor"`` takes the largest tile below it that does, ``"channel"`` one scale per
            channel, ``"padded"`` a shorter last tile (XLA computes it); None raises an error.
            ``plan.notes`` lists where it was needed.
        scale_dtype: dtype of a parameter's scales, ``"float16"`` or ``"bfloat16"``; None for that
            of the format. A parameter with scales out of the range of normal float16 gets float32,
            and ``plan.notes`` says so.
        weights_only: whether the rule matches only operations with a weight, and not those of
            activations (attention scores, the fixed coefficients of a solver), which XLA computes
            more slowly in int8 than in float. None is True for a rule that quantizes, unless it
            has `op_names` or the program closes over an operand. False is what Qwix does.
        act_static_scale: whether activations have scales that were measured before (static
            range) instead of one per call (dynamic range). None is False.
        static_range: whether the steps of a loop have a static range each (``"step"``), or one
            that holds those of all (``"joined"``). None is a range for each step of at most
            ``MOST_STEPS``. Loops whose number of steps only a run can tell have joined ranges.
        unseen_range: what an operation does whose static range no calibration batch has reached,
            such as one in a branch that was never taken: ``"dynamic"`` measures its activation at
            each call, with a warning, and ``"error"`` raises one.
        weight_calibration_method: how the range of a parameter is found: ``"absmax"``,
            ``"minmax"``, ``"rms,7"``, ``"fixed,-1,1"``, ``"percentile,99.9"``, ``"mse"``; or
            ``"balanced"``, the range of ``"absmax"`` with values rounded so that the errors of each
            channel sum to next to nothing. See ``quant_numerics.parse_calibration_method``.
        act_calibration_method: the same for activations. None is ``"absmax"``.
        act_batch_axes: axes of which the mean of the static ranges is taken, as of the examples
            that a program maps by ``vmap``; the maximum is taken over the others. ``()`` takes it
            over all, mapped examples too.
        sparsity: ``"N:M"``, such as ``"2:4"``: of each M consecutive elements of a parameter along
            its last contracted axis (of a convolution: its input channels) the N largest
            magnitudes stay, and the others are zeros, before it is quantized; None keeps all.
        kernel: ``"fused"`` to compute softmax, attention, norms and activations by the kernels of
            an installed package such as te-ffi-kernels, in one pass each; they stay float. None
            leaves them to XLA. It does not affect contractions: a rule with a `kernel` and without
            qtypes, adapters and `op_names` isn't about these.
        adapts: whether it gives parameters adapters: classes of rules that do have `adapter`.

    Raises:
        ValueError: a field has a value that is not allowed; names the field.
    """

    module_path: str = ANY_PATH
    op_names: Collection[str] | None = None
    weight_qtype: Any = None
    act_qtype: Any = None
    tile_size: int | float | None = None
    tile_fallback: Literal["divisor", "channel", "padded"] | None = "divisor"
    scale_dtype: Any = None
    weights_only: bool | None = None
    act_static_scale: bool | None = None
    static_range: Literal["step", "joined"] | None = None
    unseen_range: Literal["dynamic", "error"] = "dynamic"
    weight_calibration_method: str = "absmax"
    act_calibration_method: str | None = None
    act_batch_axes: Collection[int] = (0,)
    sparsity: str | None = None
    kernel: Literal["fused"] | None = None
    weight_path: str | None = None
    adapts: ClassVar[bool] = False

    def __post_init__(self):
        self._check_pattern("module_path", "a regular expression")
        if self.weight_path is not None:
            self._check_pattern("weight_path", "None or a regular expression")
        names = self.op_names
        if isinstance(names, str) or not all(map(_is_known, names or ())):
            allowed = f"None or a sequence of names out of {', '.join(OP_NAMES + FUSED_NAMES)}"
            raise self._error("op_names", allowed)
        self._set("op_names", tuple(sorted(names)) if names else None)
        for field in self._qtypes():
            self._set(field, self._qtype(field))
        for field in self._methods():
            self._check_method(field)
        self._check_tile("tile_size")
        self._check_choice("tile_fallback", None, "divisor", "channel", "padded")
        self._check_scales()
        self._check_choice("weights_only", None, True, False)
        self._check_unset("act_static_scale", self.act_qtype is None, "act_qtype is None")
        self._check_choice("static_range", None, "step", "joined")
        self._check_choice("unseen_range", "dynamic", "error")
        for field in ("static_range", "unseen_range"):
            self._check_unset(field, not self.is_static, "act_static_scale is not True")
        self._set("act_batch_axes", self._integers("act_batch_axes"))
        self._check_sparsity()
        self._check_choice("kernel", None, "fused")
        given = self.weight_path is not None
        self._check_unset("kernel", given, "weight_path is given: it is for no parameter")

    def adapter(self, of: Adaptable) -> Any:
        """Return the adapter of a parameter, an ``AdapterForm``, in a class that ``adapts``.

        Raises:
            ValueError: the parameter can't have it; says why.
        """
        raise NotImplementedError(f"{type(self).__name__} adapts nothing.")

    def matches(
        self,
        op_name: str,
        module_path: str,
        weight_paths: Iterable[str] = (),
        *,
        has_weight: bool | None = True,
    ) -> bool:
        """Return whether the rule is for this operation.

        Args:
            op_name: its name.
            module_path: where it is.
            weight_paths: the paths of the parameters among its operands, without the argument.
            has_weight: whether one of its operands is a weight, or would be if it were not
                computed at each call; None if that is not known.
        """
        if not self.matches_weight(weight_paths):
            return False
        if has_weight is None:
            has_weight = not self.weights_only
        if not has_weight and self.leaves_activations and not is_fused(op_name):
            return False
        if self.op_names is not None:
            named = op_name in self.op_names
        elif is_fused(op_name):
            named = self.kernel is not None
        else:
            named = op_name not in NAMED_ONLY and (self.kernel is None or self.is_acting)
        # ASCII, like the automata that decide which paths share a trace (see PathKeys).
        return named and matches_path(self.module_path, module_path)

    def matches_weight(self, weight_paths: Iterable[str]) -> bool:
        """Return whether the rule is for operations of parameters with these paths."""
        pattern = self.weight_path
        return pattern is None or any(matches_path(pattern, p) for p in weight_paths)

    @property
    def leaves_activations(self) -> bool:
        """Return whether contractions of two activations are left to other rules."""
        if self.weights_only is not None:
            return self.weights_only
        return self.op_names is None and self.is_acting

    @property
    def is_static(self) -> bool:
        """Return whether anything has a static range."""
        return bool(self.act_static_scale)

    @property
    def is_acting(self) -> bool:
        """Return whether it quantizes operands or gives them adapters."""
        return self.adapts or any(x is not None for x in (self.weight_qtype, self.act_qtype))

    @property
    def act_method(self) -> str:
        """``act_calibration_method``, or its default."""
        return self.act_calibration_method or "absmax"

    @property
    def given(self) -> dict[str, Any]:
        """The fields that are not at their defaults, by name."""
        pairs = [(one, getattr(self, one.name)) for one in fields(self)]
        return {one.name: value for one, value in pairs if value != one.default}

    def _qtypes(self) -> Sequence[str]:
        """Return the fields that hold a qtype."""
        return ("weight_qtype", "act_qtype")

    def _methods(self) -> Sequence[str]:
        """Return the fields that hold a calibration method."""
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
            # It names what was given.
            raise ValueError(
                f"{type(self).__name__}.{field} must be None or a qtype: {error}"
            ) from error

    def _check_pattern(self, field: str, allowed: str) -> None:
        value = getattr(self, field)
        if not isinstance(value, str):
            raise self._error(field, allowed)
        try:
            check_pattern(value)
        except ValueError as error:
            raise self._error(field, f"{allowed} ({error})") from error

    def _check_choice(self, field: str, *allowed: Any) -> None:
        value = getattr(self, field)
        if not any(value is one or (value == one and isinstance(one, str)) for one in allowed):
            *first, last = map(repr, allowed)
            raise self._error(field, f"{', '.join(first)} or {last}")

    def _check_unset(self, field: str, unset: bool, where: str) -> None:
        """Raise ValueError where a field must be at its default, and is not."""
        default = self.__dataclass_fields__[field].default
        if unset and getattr(self, field) != default:
            raise self._error(field, f"{default!r} where {where}")

    def _check_method(self, field: str) -> None:
        value = getattr(self, field)
        if value is None and self.__dataclass_fields__[field].default is None:
            return
        try:
            method = qn.parse_calibration_method(value)
        except (TypeError, ValueError, AttributeError) as error:
            raise self._error(field, f"a calibration method. {error}") from error
        if method.name == "balanced" and field != "weight_calibration_method":
            raise self._error(field, "another method than 'balanced', which rounds parameters")

    def _check_tile(self, field: str) -> None:
        tile = getattr(self, field)
        if tile is None:
            return
        if isinstance(tile, float) and 0 < tile <= 1 and abs(1 / tile - round(1 / tile)) < 1e-6:
            return
        if not isinstance(tile, int) or isinstance(tile, bool) or tile < 1:
            allowed = "None, a positive number of elements, or one over a number of tiles"
            raise self._error(field, allowed)

    def _check_scales(self) -> None:
        if self.scale_dtype is None:
            return
        self._check_unset("scale_dtype", self.weight_qtype is None, "weight_qtype is None")
        try:
            kind = qn.get_qtype(self.weight_qtype).with_scales(self.scale_dtype)
        except (TypeError, ValueError) as error:
            raise self._error("scale_dtype", f"None or the dtype of scales. {error}") from error
        self._set("scale_dtype", kind.scale_dtype.name)

    def _check_sparsity(self) -> None:
        if self.sparsity is None:
            return
        try:
            parse_sparsity(self.sparsity)
        except ValueError as error:
            raise self._error("sparsity", f"None or {error}") from error
        self._check_unset("sparsity", self.weight_qtype is None, "weight_qtype is None")

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
