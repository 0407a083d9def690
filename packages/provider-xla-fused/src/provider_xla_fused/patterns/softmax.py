"""Softmax: the values from scores to probabilities."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from hijax_trace import Expression, Operation

Labels = tuple[tuple[str, ...], ...]
"""For each axis of a value, the labels of the scores' axes that it consists of. An axis of one
element has none, and neither has an axis along which the value is repeated."""

VIEWS = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "squeeze", "transpose"})
"""Primitives that a pattern may compute again, because they cost nothing in XLA."""


def compact(value: Expression, axes: Labels) -> tuple[Expression, Labels]:
    """Return a value before its broadcasts, and its axes' labels."""
    while isinstance(value, Operation):
        name, inner = value.primitive.name, value.operands[0] if value.operands else None
        if inner is None or not hasattr(inner.aval, "shape"):
            break
        if name == "broadcast_in_dim":
            places = value.params["broadcast_dimensions"]
            sizes = zip(places, inner.aval.shape, strict=True)
            axes = tuple(
                axes[place] if size > 1 or value.aval.shape[place] == 1 else ()
                for place, size in sizes
            )
        elif name == "convert_element_type" and _is_wider(inner.aval.dtype, value.aval.dtype):
            pass
        else:
            break
        value = inner
    return value, axes


def _is_wider(before: Any, after: Any) -> bool:
    """Return whether a conversion is exact."""
    if before == jnp.bool_:
        return True
    both = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
    return both and jnp.promote_types(before, after) == after


def evaluated(value: Expression) -> np.ndarray:
    """Return the value of an expression of constants."""
    return np.asarray(value.evaluate({}))


def constant(value: Expression) -> float | None:
    """Return the number that a value is everywhere, or None."""
    value, _ = compact(value, ((),) * len(value.aval.shape))
    if not value.is_constant or value.aval.size != 1:
        return None
    return float(evaluated(value).reshape(()))


def arranged(
    x: jax.Array, axes: Labels, wanted: Sequence[Sequence[str]], sizes: Mapping[str, int]
) -> jax.Array:
    """Return an array with its labelled axes split, transposed and merged.

    An axis of the result of which the array has no label is of size 1. If it has some of the
    labels, it is repeated along the others.
    """
    own = [label for labels in axes for label in labels]
    x = x.reshape([sizes[label] for label in own])
    found = [[label for label in labels if label in own] for labels in wanted]
    x = x.transpose([own.index(label) for labels in found for label in labels])
    split, whole = [], []
    for labels, present in zip(wanted, found, strict=True):
        used = labels if present else []
        split += [sizes[label] if label in present else 1 for label in used]
        whole += [sizes[label] for label in used]
    shape = [
        math.prod(sizes[label] for label in labels) if present else 1
        for labels, present in zip(wanted, found, strict=True)
    ]
    return jnp.broadcast_to(x.reshape(split), whole).reshape(shape)


Kind = Literal["scores", "row", "shifted", "exp", "sum", "inverse", "log", "lse", "logp", "probs"]
"""``row`` is a value computed from the scores' maxima, ``shifted`` the scores minus a row, ``lse``
the logarithm of the sum plus that row, ``logp`` the logarithm of the probabilities."""


@dataclasses.dataclass(frozen=True)
class Step:
    """One operation on scores before their softmax.

    Attributes:
        name: "mul", "div", "add", "sub", "tanh" or "where".
        by: the other operand; for "where" the condition.
        axes: the labels of its axes.
        fill: for "where", the value of the other elements.
        keeps: for "where", whether scores are kept where the condition is True.
    """

    name: str
    by: Expression | None = None
    axes: Labels = ()
    fill: Expression | None = None
    keeps: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Logits:
    """A contraction of two activations, and the steps after it.

    Attributes:
        operands: the operands of the contraction.
        axes: the labels of their axes. Labels of contracted axes begin with "c", of batch axes
            with "b", of others with "l" or "r" for the left or right operand.
        sizes: the sizes of the labels.
        steps: the steps, in order.
    """

    operands: tuple[Expression, Expression]
    axes: tuple[Labels, Labels]
    sizes: Mapping[str, int]
    steps: tuple[Step, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Tracked:
    """A value on the way from scores to probabilities.

    Attributes:
        kind: which value it is.
        logits: the scores.
        axes: the labels of its axes.
        members: the numbers of the equations that made it.
        over: the labels that were reduced.
        row: identifies the row that it is, or that was subtracted from the scores; None for none.
    """

    kind: Kind
    logits: Logits
    axes: Labels
    members: frozenset[int]
    over: frozenset[str] = frozenset()
    row: object = None


Operand = Tracked | Expression
Rule = Callable[[Any, Sequence[Operand]], Tracked | None]


def follow(eqn: Any, operands: Sequence[Operand]) -> Tracked | None:
    """Return an equation's result as a step of a softmax, with the members of its operand."""
    rule = _RULES.get(eqn.primitive.name)
    found = None if rule is None else rule(eqn, operands)
    if found is None or not jnp.issubdtype(eqn.outvars[0].aval.dtype, jnp.inexact):
        # ``is_finite`` of a row is a row of booleans, with which programs select.
        return found if found is not None and found.kind == "row" else None
    return found


def _with(value: Tracked, **changes: Any) -> Tracked:
    return dataclasses.replace(value, **changes)


def _same(eqn: Any, operands: Sequence[Operand]) -> Tracked | None:
    (value,) = operands
    return value if isinstance(value, Tracked) else None


def _transpose(eqn: Any, operands: Sequence[Operand]) -> Tracked | None:
    (value,) = operands
    assert isinstance(value, Tracked)
    return _with(value, axes=tuple(value.axes[axis] for axis in eqn.params["permutation"]))


def _reshape(eqn: Any, operands: Sequence[Operand]) -> Tracked | None:
    (value,) = operands
    assert isinstance(value, Tracked)
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    sizes = value.logits.sizes
    # Labels can't tell where an axis goes along which a row is repeated.
    if any(size > 1 and not labels for size, labels in zip(before, value.axes, strict=True)):
        return None
    left, axes = [label for labels in value.axes for label in labels], []
    for size in after:
        taken: list[str] = []
        while size > 1:
            if not left or size % sizes[left[0]]:
                return None
            size //= sizes[left[0]]
            taken.append(left.pop(0))
        axes.append(tuple(taken))
    return _with(value, axes=tuple(axes))


def _broadcast(eqn: Any, operands: Sequence[Operand]) -> Tracked | None:
    value = operands[0]
    if not isinstance(value, Tracked):
        return None
    axes: list[tuple[str, ...]] = [()] * len(eqn.outvars[0].aval.shape)
    for axis, place in enumerate(eqn.params["broadcast_dimensions"]):
        axes[place] = value.axes[axis]
    grows = eqn.outvars[0].aval.size > eqn.invars[0].aval.size
    return None if grows and value.kind not in _OF_ROWS else _with(value, axes=tuple(axes))


_OF_ROWS = ("row", "sum", "inverse", "log", "lse")


def _reduce(eqn: Any, operands: Sequence[Operand]) -> Tracked | None:
    (value,) = operands
    assert isinstance(value, Tracked)
    reduced = [int(axis) for axis in eqn.params["axes"]]
    over = frozenset(label for axis in reduced for label in value.axes[axis])
    axes = tuple(labels for axis, labels in enumerate(value.axes) if axis not in reduced)
    if not over:
        return None
    if eqn.primitive.name == "reduce_max" and value.kind == "scores":
        return _with(value, kind="row", axes=axes, over=over, row=object())
    if eqn.primitive.name == "reduce_sum" and value.kind == "exp":
        return _with(value, kind="sum", axes=axes, over=over)
    return None


def _exp(eqn: Any, operands: Sequence[Operand]) -> Tracked | None:
    (value,) = operands
    assert isinstance(value, Tracked)
    if value.kind in ("scores", "shifted"):
        return _with(value, kind="exp")
    return _with(value, kind="probs") if value.kind == "logp" else None


def _unary(kinds: Mapping[str, Kind]) -> Rule:
    def rule(eqn: Any, operands: Sequence[Operand]) -> Tracked | None:
        (value,) = operands
        assert isinstance(value, Tracked)
        if value.kind == "row":
            return _with(value, row=object())
        return _with(value, kind=kinds[value.kind]) if value.kind in kinds else None

    return rule


def _power(eqn: Any, operands: Sequence[Operand]) -> Tracked | None:
    (value,) = operands
    assert isinstance(value, Tracked)
    is_inverse = value.kind == "sum" and eqn.params["y"] == -1
    return _with(value, kind="inverse") if is_inverse else None


def _tanh(eqn: Any, operands: Sequence[Operand]) -> Tracked | None:
    (value,) = operands
    assert isinstance(value, Tracked)
    return _stepped(value, Step("tanh")) if value.kind == "scores" else None


def _stepped(value: Tracked, step: Step) -> Tracked:
    logits = dataclasses.replace(value.logits, steps=(*value.logits.steps, step))
    return _with(value, logits=logits)


def _rows(eqn: Any, operands: Sequence[Operand]) -> Tracked | None:
    """Return the row that is computed from rows and constants."""
    rows = [value for value in operands if isinstance(value, Tracked)]
    constant = all(isinstance(x, Tracked) or x.is_constant for x in operands)
    if not constant or any(one.kind != "row" or one.over != rows[0].over for one in rows):
        return None
    shape = eqn.outvars[0].aval.shape
    shapes = [atom.aval.shape for atom in eqn.invars]
    whole = [one for one, own in zip(operands, shapes, strict=True) if own == shape]
    full = next((one for one in whole if isinstance(one, Tracked)), None)
    return None if full is None else _with(full, row=object())


def _binary(eqn: Any, operands: Sequence[Operand]) -> Tracked | None:
    name = eqn.primitive.name
    left, right = operands
    if isinstance(left, Tracked) and isinstance(right, Tracked):
        return _both(name, left, right) or _rows(eqn, operands)
    first = left if isinstance(left, Tracked) else right
    assert isinstance(first, Tracked)
    if first.kind == "row":
        return _rows(eqn, operands)
    if name == "div" and first is right:
        (one,) = [x for x in operands if isinstance(x, Expression)]
        return _with(first, kind="inverse") if first.kind == "sum" and _is_one(one) else None
    if first.kind != "scores" or (name == "sub" and first is right) or name == "max":
        return None
    (other,) = [x for x in operands if isinstance(x, Expression)]
    if eqn.outvars[0].aval.shape != eqn.invars[operands.index(first)].aval.shape:
        return None  # the other operand broadcasts the scores
    return _stepped(first, Step(name, other, _axes(first, other)))


def _axes(scores: Tracked, other: Expression) -> Labels:
    """Return the labels of the axes of a bias or mask."""
    pairs = zip(scores.axes, other.aval.shape, strict=True) if other.aval.shape else ()
    return tuple(labels if size > 1 else () for labels, size in pairs)


def _both(name: str, left: Tracked, right: Tracked) -> Tracked | None:
    # Bring commutative operations into the order of the table below.
    if name in ("add", "mul") and left.kind in _OF_ROWS and right.kind not in ("log", "row"):
        left, right = right, left
    if name == "add" and left.kind == "row" and right.kind == "log":
        left, right = right, left
    kinds = (name, left.kind, right.kind)
    if kinds == ("add", "log", "row"):
        fits = left.row is right.row and left.over == right.over and left.axes == right.axes
        return _with(left, kind="lse") if fits else None
    if not _is_along(right, left):
        return None
    if kinds == ("sub", "scores", "row"):
        return _with(left, kind="shifted", row=right.row)
    if kinds == ("sub", "scores", "lse") and left.logits is right.logits:
        return _with(left, kind="logp", over=right.over)
    fits = left.logits is right.logits and left.row is right.row
    if kinds == ("sub", "shifted", "log") and fits:
        return _with(left, kind="logp", over=right.over)
    if kinds in (("div", "exp", "sum"), ("mul", "exp", "inverse")) and fits:
        return _with(left, kind="probs", over=right.over)
    return None


def _is_along(row: Tracked, value: Tracked) -> bool:
    """Return whether a row has a value's axes but the reduced ones."""
    kept = [tuple(x for x in labels if x not in row.over) for labels in value.axes]
    return row.kind in _OF_ROWS and list(row.axes) == kept


def _is_one(value: Expression) -> bool:
    found = constant(value)
    return found is not None and found == 1


def _select(eqn: Any, operands: Sequence[Operand]) -> Tracked | None:
    which, *cases = operands
    scores = [case for case in cases if isinstance(case, Tracked) and case.kind == "scores"]
    if len(cases) != 2 or len(scores) != 1 or isinstance(which, Tracked):
        return _rows(eqn, operands)
    (fill,) = [case for case in cases if case is not scores[0]]
    if isinstance(fill, Tracked):
        return None
    keeps = scores[0] is cases[1]
    return _stepped(scores[0], Step("where", which, _axes(scores[0], which), fill, keeps))


_SAME = ("copy", "copy_p", "convert_element_type", "name", "reduce_precision", "stop_gradient")

_RULES: dict[str, Rule] = {
    **dict.fromkeys(_SAME, _same),
    **dict.fromkeys(("add", "sub", "mul", "div", "max"), _binary),
    "abs": _unary({"sum": "sum"}),
    "broadcast_in_dim": _broadcast,
    "exp": _exp,
    "expand_dims": _reshape,
    "integer_pow": _power,
    "is_finite": _unary({}),
    "log": _unary({"sum": "log"}),
    "reduce_max": _reduce,
    "reduce_sum": _reduce,
    "reshape": _reshape,
    "select_n": _select,
    "squeeze": _reshape,
    "tanh": _tanh,
    "transpose": _transpose,
}
