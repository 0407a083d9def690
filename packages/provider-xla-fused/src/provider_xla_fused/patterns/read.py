"""Read: an attention from two contractions and the steps in between."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hijax_trace import Expression

from .attention import Attention, Beside
from .softmax import Labels, Logits, Step, Tracked, compact, constant, evaluated

_MASKED = -1e4
"""The largest masked score: the exponential of it is zero in any float."""
_LARGEST_KNOWN = 1 << 24
"""The most elements that a mask may have to be checked for being causal."""


class NotAttention(Exception):
    """The program computes another function. The message is the reason."""


def start(operands: tuple[Expression, Expression], dims: Any) -> tuple[Logits, Labels]:
    """Return a contraction as scores, and the labels of its axes."""
    (lc, rc), (lb, rb) = dims
    sizes: dict[str, int] = {}
    own: list[list[tuple[str, ...]]] = [[()] * len(x.aval.shape) for x in operands]

    def name(label: str, *places: tuple[int, int]) -> tuple[str, ...]:
        (side, axis) = places[0]
        size = operands[side].aval.shape[axis]
        # Axes of one element have no label, because programs drop and add them anywhere.
        found = (label,) if size > 1 else ()
        sizes.update(dict.fromkeys(found, size))
        for side, axis in places:
            own[side][axis] = found
        return found

    axes = [name(f"b{i}", (0, a), (1, b)) for i, (a, b) in enumerate(zip(lb, rb, strict=True))]
    for i, (a, b) in enumerate(zip(lc, rc, strict=True)):
        name(f"c{i}", (0, a), (1, b))
    for side, gone in enumerate(((*lc, *lb), (*rc, *rb))):
        kept = [axis for axis in range(len(own[side])) if axis not in gone]
        axes += [name(f"{'lr'[side]}{axis}", (side, axis)) for axis in kept]
    left, right = map(tuple, own)
    return Logits(operands, (left, right), sizes), tuple(axes)


def finish(
    probs: Tracked, values: Expression, dims: Any, side: int, aval: Any, result: Expression
) -> Attention:
    """Return the attention that a contraction of probabilities with values completes.

    NotAttention: the program computes another function. ``side`` is the operand with probabilities.
    """
    logits, over = probs.logits, probs.over
    contracted, batch = dims
    sides = {label[0] for label in over}
    (key_side,) = sides if len(sides) == 1 else (None,)
    of_side = {label for label in logits.sizes if label[0] == key_side}
    if key_side not in ("l", "r") or of_side != over:
        raise NotAttention("the softmax is over other axes than those of one operand")
    if {x for axis in contracted[side] for x in probs.axes[axis]} != over:
        raise NotAttention("other axes are contracted than those of the softmax")
    shared = {label for label in logits.sizes if label[0] == "b"}
    if {x for axis in batch[side] for x in probs.axes[axis]} != shared:
        raise NotAttention("the values have other batch axes than the keys")
    sizes = dict(logits.sizes)
    own: list[tuple[str, ...]] = [()] * len(values.aval.shape)
    for mine, theirs in ((contracted[side], contracted[1 - side]), (batch[side], batch[1 - side])):
        for axis, other in zip(mine, theirs, strict=True):
            own[other] = probs.axes[axis]
    gone = (*contracted[1 - side], *batch[1 - side])
    for axis, size in enumerate(values.aval.shape):
        if axis not in gone and size > 1:
            own[axis] = (f"v{axis}",)
            sizes[f"v{axis}"] = size
    kept = (
        [own[a] for a in range(len(own)) if a not in gone],
        [
            probs.axes[a]
            for a in range(len(probs.axes))
            if a not in (*contracted[side], *batch[side])
        ],
    )
    left, right = kept if side else kept[::-1]
    out = (*(probs.axes[axis] for axis in batch[side]), *left, *right)
    query = 1 if key_side == "l" else 0
    logits = dataclasses.replace(logits, sizes=sizes)
    steps = _Steps(logits.steps)
    order = _order(logits, query, over, steps)
    return Attention(
        steps.scale,
        steps.softcap,
        *_causal(steps, order, sizes),
        logits,
        query,
        (values, tuple(own)),
        tuple(steps.factors),
        tuple(steps.biases),
        tuple(steps.masks),
        order,
        (out, aval),
        result,
    )


class _Steps:
    """The steps between scores and softmax, in the form that kernels have."""

    def __init__(self, steps: Sequence[Step]):
        self.scale, self._outer = 1.0, 1.0
        self._is_capped = False
        self.factors: list[tuple[Expression, bool]] = []
        self.biases: list[Beside] = []
        self.masks: list[Beside] = []
        self.fills = False
        for step in steps:
            _TAKE[step.name](self, step)
        if self._is_capped:
            self.scale *= self._outer
        self.softcap = self._outer if self._is_capped else None
        if self._is_capped and self._outer <= 0:
            raise NotAttention("its cap is negative")

    def multiply(self, step: Step) -> None:
        """Apply a factor."""
        assert step.by is not None
        if self.masks:
            raise NotAttention("it is scaled after its mask")
        by, divides = constant(step.by), step.name == "div"
        if by is None:
            value, _ = compact(step.by, step.axes)
            if self._is_capped or self.biases or value.aval.size != 1:
                raise NotAttention("its scale is not a number")
            self.factors.append((value, divides))
            return
        if not math.isfinite(by) or (divides and by == 0):
            raise NotAttention(f"its scale is {by}")
        by = 1 / by if divides else by
        self.biases = [one._replace(factor=one.factor * by) for one in self.biases]
        if self._is_capped:
            self._outer *= by
        else:
            self.scale *= by

    def cap(self, step: Step) -> None:
        """Apply a tanh."""
        if self._is_capped or self.biases or self.masks:
            raise NotAttention("it is capped twice, or after a bias or mask")
        self._is_capped = True

    def add(self, step: Step) -> None:
        """Apply a bias."""
        assert step.by is not None
        if self.masks:
            raise NotAttention("something is added after its mask")
        sign = -1.0 if step.name == "sub" else 1.0
        self.biases.append(Beside(*compact(step.by, step.axes), sign))

    def mask(self, step: Step) -> None:
        """Apply a mask."""
        assert step.by is not None
        assert step.fill is not None
        fill = constant(step.fill)
        if fill is None or not fill <= _MASKED:
            raise NotAttention("masked scores are not a large negative number")
        self.fills |= fill > -math.inf
        self.masks.append(Beside(*compact(step.by, step.axes), keeps=step.keeps))


_TAKE = {
    "add": _Steps.add,
    "div": _Steps.multiply,
    "mul": _Steps.multiply,
    "sub": _Steps.add,
    "tanh": _Steps.cap,
    "where": _Steps.mask,
}


def _order(
    logits: Logits, query: int, over: frozenset[str], steps: _Steps
) -> tuple[tuple[str, ...], ...]:
    """Return the labels of batch, heads, groups, queries and keys."""
    own = [label for labels in logits.axes[query] for label in labels]
    theirs = [label for labels in logits.axes[1 - query] for label in labels]
    keys = tuple(label for label in theirs if label in over)
    batch = [label for label in theirs if label[0] == "b"]
    # A kernel reads key heads after the keys in place. Batch axes before the keys stay batch.
    heads = [label for label in batch if theirs.index(label) > theirs.index(keys[0])]
    rows = [label for label in own if label[0] in "lr"]
    varying = {x for one in (*steps.biases, *steps.masks) for labels in one.axes for x in labels}
    queries = [label for label in rows if label in varying]
    if len(queries) != 1:
        queries = sorted(rows, key=lambda label: logits.sizes[label])[-1:]
    group = tuple(label for label in rows if label not in queries)
    return tuple(x for x in batch if x not in heads), tuple(heads), group, tuple(queries), keys


def _causal(
    steps: _Steps, order: tuple[tuple[str, ...], ...], sizes: Mapping[str, int]
) -> tuple[bool, bool]:
    """Return ``is_causal`` and ``fills``, and remove causal masks from the steps."""
    *_, queries, keys = order
    found = False
    for one in list(steps.masks):
        if [labels for labels in one.axes if labels] != [queries, keys] or not queries:
            continue
        value = one.value
        if value.is_constant and value.aval.size <= _LARGEST_KNOWN:
            seen = evaluated(value).astype(bool).reshape(-1, math.prod(sizes[x] for x in keys))
            rows, columns = seen.shape
            seen = seen if one.keeps else ~seen
            if rows == columns and np.array_equal(seen, np.tri(rows, dtype=bool)):
                steps.masks.remove(one)
                found = True
    return found, steps.fills and bool(steps.masks)
