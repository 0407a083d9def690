"""Attention: two contractions and the steps in between, read as one operation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from hijax_trace import Expression

from .softmax import Labels, Logits, Step, Tracked, arranged, compact, constant, evaluated

RESULT = "result"
"""Pytree path of the leaf that stands for the second contraction's result."""


class Operands(NamedTuple):
    """The operands of an attention, in the layout of kernels.

    Attributes:
        query: float[batch, queries, heads, size].
        key: float[batch, keys, key heads, size]; heads are a multiple of key heads.
        value: float[batch, keys, key heads, value size].
        bias: float32[1 or batch, 1 or heads, 1 or queries, 1 or keys], added to the logits; or
            None.
        mask: bool of such a shape, False where a key is masked; or None.
    """

    query: jax.Array
    key: jax.Array
    value: jax.Array
    bias: jax.Array | None
    mask: jax.Array | None


class Beside(NamedTuple):
    """A bias or mask of the scores.

    Attributes:
        value: the array.
        axes: the labels of its axes.
        factor: of a bias, what it is multiplied with.
        keeps: of a mask, whether True keeps a score.
    """

    value: Expression
    axes: Labels
    factor: float = 1.0
    keeps: bool = True


@dataclasses.dataclass(frozen=True, eq=False)
class Attention:
    """An attention that a program spells out.

    Attributes:
        scale: the factor of the logits.
        softcap: if not None, logits become softcap * tanh(logits / softcap).
        is_causal: whether query ``i`` sees keys 0 to ``i`` alone. The mask is without that then.
        fills: whether a query that sees no key has equal probabilities for all keys, not NaN.
    """

    scale: float
    softcap: float | None
    is_causal: bool
    fills: bool
    _logits: Logits
    _query: int
    _values: tuple[Expression, Labels]
    _factors: tuple[tuple[Expression, bool], ...]
    _biases: tuple[Beside, ...]
    _masks: tuple[Beside, ...]
    _order: tuple[tuple[str, ...], ...]
    _out: tuple[Labels, Any]
    _result: Expression
    _inputs: tuple[str, ...] = ()

    def of(self, result: Expression) -> tuple[Attention, list[int]]:
        """Return the attention with another result, and its inputs' numbers.

        Args:
            result: the result, computed from the second contraction's (the leaf ``RESULT``).
        """
        beside = [one.value for one in (*self._biases, *self._masks)]
        factors = [value for value, _ in self._factors]
        used = [leaf for x in (*self.contracted, *beside, *factors, result) for leaf in x.leaves()]
        numbers = sorted({leaf.number for leaf in used if leaf.path != RESULT})
        return dataclasses.replace(self, _result=result, _inputs=tuple(map(str, numbers))), numbers

    @property
    def contracted(self) -> tuple[Expression, Expression, Expression]:
        """The queries, keys and values that the program contracts."""
        query, key = self._logits.operands[self._query], self._logits.operands[1 - self._query]
        return query, key, self._values[0]

    @property
    def places(self) -> list[list[int]]:
        """The numbers of the inputs of queries, keys and values."""
        return [[self._inputs.index(leaf.path) for leaf in x.leaves()] for x in self.contracted]

    @property
    def bias_dtypes(self) -> list[Any]:
        """The dtypes of the biases."""
        return [one.value.aval.dtype for one in self._biases]

    def operands(self, *values: jax.Array) -> Operands:
        """Return the operands of a kernel, from the values of the inputs."""
        inputs = dict(zip(self._inputs, values, strict=True))
        sizes, (batch, heads, group, queries, keys) = self._logits.sizes, self._order
        query, key, value = (one.evaluate(inputs) for one in self.contracted)
        dtype = jnp.result_type(query, key, value)
        own, of_keys = self._logits.axes[self._query], self._logits.axes[1 - self._query]
        size = tuple(label for labels in own for label in labels if label[0] == "c")
        rest = tuple(label for labels in self._values[1] for label in labels if label[0] == "v")
        query = arranged(query, own, (batch, queries, heads + group, size), sizes)
        for factor, divides in self._factors:
            by = factor.evaluate(inputs).reshape(()).astype(jnp.float32)
            query = (query / by if divides else query * by).astype(query.dtype)
        key = arranged(key, of_keys, (batch, keys, heads, size), sizes)
        value = arranged(value, self._values[1], (batch, keys, heads, rest), sizes)

        def beside(one: Beside) -> jax.Array:
            x, axes = one.value.evaluate(inputs), one.axes
            return arranged(x, axes, (batch, heads + group, queries, keys), sizes)

        bias = mask = None
        for one in self._biases:
            added = beside(one).astype(jnp.float32) * one.factor
            bias = added if bias is None else bias + added
        for one in self._masks:
            found = beside(one).astype(bool)
            found = found if one.keeps else ~found
            mask = found if mask is None else mask & found
        query, key, value = (x.astype(dtype) for x in (query, key, value))
        return Operands(query, key, value, bias, mask)

    def result(self, out: jax.Array, *values: jax.Array) -> jax.Array:
        """Return the program's result from a kernel's.

        Args:
            out: float[batch, queries, heads, value size], the kernel's result.
            values: the values of the inputs.
        """
        inputs = dict(zip(self._inputs, values, strict=True))
        batch, heads, group, queries, _ = self._order
        (axes, aval), sizes = self._out, self._logits.sizes
        rest = tuple(label for labels in axes for label in labels if label[0] == "v")
        own = (batch, queries, heads + group, rest)
        x = arranged(out, own, axes, sizes).reshape(aval.shape).astype(aval.dtype)
        return self._result.evaluate({**inputs, RESULT: x})

    def __call__(self, *values: jax.Array) -> jax.Array:
        """Compute the result in plain operations, in float32."""
        query, key, value, bias, mask = self.operands(*values)
        batch, queries, heads, size = query.shape
        grouped = query.reshape(batch, queries, key.shape[2], -1, size).astype(jnp.float32)
        logits = jnp.einsum("bqhgd,bkhd->bhgqk", grouped, key.astype(jnp.float32)) * self.scale
        logits = logits.reshape(batch, heads, queries, -1)
        if self.softcap is not None:
            logits = self.softcap * jnp.tanh(logits / self.softcap)
        logits = logits if bias is None else logits + bias
        if self.is_causal:
            causal = jnp.tri(*logits.shape[-2:], dtype=bool)
            mask = causal if mask is None else mask & causal
        low = jnp.finfo(jnp.float32).min if self.fills else -jnp.inf
        logits = logits if mask is None else jnp.where(mask, logits, low)
        probs = jax.nn.softmax(logits).reshape(batch, key.shape[2], -1, *logits.shape[-2:])
        out = jnp.einsum("bhgqk,bkhd->bqhgd", probs, value.astype(jnp.float32))
        return self.result(out.reshape(batch, queries, heads, -1), *values)


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
