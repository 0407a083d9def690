"""Values: helpers for the biases, masks and operands of a pattern."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

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
