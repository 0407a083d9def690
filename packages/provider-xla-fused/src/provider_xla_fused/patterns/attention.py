"""Attention: two contractions with a softmax in between, as one operation."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hijax_trace import Expression

from .softmax import Labels, Logits, arranged

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
