"""Reshaped: operands of an operation in the shape of a call's result; see ``joins``."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .. import compat


def reshaped(value: Any, whole: Sequence[int], shape: tuple[int, ...]) -> Any:
    """Return an operand in another shape, or the row that it consists of.

    Args:
        value: the operand, which can be broadcast to ``whole``.
        whole: the shape of the operation's result.
        shape: a shape of as many elements.

    Returns:
        An array of that shape; or one of shape ``shape[-1:]`` that is repeated along the other
        axes, if that is what the program broadcast.
    """
    columns, many = shape[-1], math.prod(shape[:-1]) > 1
    row, views, source = None, [], value
    same = value if value.shape == shape else None
    while compat.is_staged(source):
        if source.size == columns and (many or source.ndim == 1):
            row = source, views[:]
        _, eqn = compat.producer(source)
        if eqn is None or eqn.primitive.name not in VIEWS:
            break
        views.append(eqn)
        source = eqn.in_tracers[0]
        if source.shape == shape and source.size == value.size:
            same = source
    if row is not None and _is_row(*row, whole, shape):
        return row[0] if row[0].ndim == 1 else lax.reshape(row[0], (columns,))
    return lax.reshape(jnp.broadcast_to(value, whole), shape) if same is None else same


def _is_row(row: Any, views: Sequence[Any], whole: Sequence[int], shape: Sequence[int]) -> bool:
    """Return whether an array that is viewed and broadcast is the same along all axes but one."""
    memory = view = np.empty(row.shape, np.int8)  # looked at, and never touched
    for eqn in reversed(views):
        view = VIEWS[eqn.primitive.name](view, eqn.outvars[0].aval.shape, eqn.params)
    view = np.broadcast_to(view, whole).reshape(shape)
    if not np.may_share_memory(view, memory):  # NumPy had to copy
        return False
    steps = zip(view.shape, view.strides, (*(0 for _ in shape[:-1]), 1), strict=True)
    return all(size == 1 or step == wanted for size, step, wanted in steps)


def _broadcast(view: np.ndarray, shape: Sequence[int], params: dict[str, Any]) -> np.ndarray:
    new = [axis for axis in range(len(shape)) if axis not in params["broadcast_dimensions"]]
    return np.broadcast_to(np.expand_dims(view, new), shape)


VIEWS: dict[str, Callable[[np.ndarray, Sequence[int], dict[str, Any]], np.ndarray]] = {
    "broadcast_in_dim": _broadcast,
    "reshape": lambda view, shape, params: view.reshape(shape),
    "squeeze": lambda view, shape, params: view.reshape(shape),
}
"""By primitive: what an array becomes. They keep the order of elements."""
