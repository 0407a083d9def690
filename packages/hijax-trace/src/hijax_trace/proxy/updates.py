"""Updates: what writing primitives do to an array proxy's parts.

The new elements are encoded in the form of the proxy first. Then quantized values and scales are
written in the same way. A scale that several elements share can only be replaced with all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import compat
from .move import Move, MoveError
from .moves import data_in, uniform_axes


def written(how: Move, parts: Sequence[jax.Array]) -> jax.Array:
    """Return one part of the result of a primitive that writes elements.

    Args:
        how: the equation, of one of ``UPDATES``. ``data`` are the arrays that it reads elements
            from, the updated one first.

    Raises:
        MoveError: only some of the elements that share a scale are written.
    """
    return _RULES[how.primitive](how, parts)


def axes_of(primitive: str, params: Mapping[str, Any], ndim: int, is_new: bool) -> list[int | None]:
    """Return the updated array's axis for each axis of an operand.

    Args:
        is_new: whether the operand has the new elements.

    Returns:
        For each axis of the operand the axis of the array; None for an axis over several places.
    """
    if primitive != "scatter" or not is_new:
        return list(range(ndim))
    axes: list[int | None] = [None] * ndim
    for axis, place in _window(params["dimension_numbers"]).items():
        axes[place] = axis
    return axes


def _window(numbers: lax.ScatterDimensionNumbers) -> dict[int, int]:
    """Return the axes of a scatter's updates, by axis of the array."""
    gone = {*map(int, numbers.inserted_window_dims), *map(int, numbers.operand_batching_dims)}
    places = list(map(int, numbers.update_window_dims))
    kept = [axis for axis in range(len(places) + len(gone)) if axis not in gone]
    return dict(zip(kept, places, strict=True))


def _coarse(how: Move, part: jax.Array) -> list[int]:
    """Return the axes along which elements share a scale of a part."""
    full = how.shapes[0]
    return [axis for axis, size in enumerate(full) if part.shape[axis] != size]


def _check_whole(how: Move, part: jax.Array, window: Sequence[int]) -> None:
    """Raise MoveError unless a window covers axes that share scales."""
    full = how.shapes[0]
    for axis in _coarse(how, part):
        if window[axis] != full[axis]:
            raise MoveError(
                f"{how.primitive} writes {window[axis]} of {full[axis]} elements of axis {axis}, "
                "which share scales"
            )


def _dynamic_update_slice(how: Move, parts: Sequence[jax.Array]) -> jax.Array:
    x, new = parts
    _check_whole(how, x, how.shapes[1])
    # The starts are right for scales, too: XLA clips a start to 0 where all of an axis is written.
    starts = how.operands[2:]
    # The primitive clips a negative start to 0, where the function would wrap it.
    return lax.dynamic_update_slice(x, new.astype(x.dtype), starts, allow_negative_indices=False)


def _scatter(how: Move, parts: Sequence[jax.Array]) -> jax.Array:
    (x, new), params = parts, how.params
    numbers, window = params["dimension_numbers"], [1] * x.ndim
    for axis, place in _window(numbers).items():
        window[axis] = how.shapes[1][place]
    _check_whole(how, x, window)
    names = ("indices_are_sorted", "unique_indices", "mode")
    options = {name: params[name] for name in names}
    return lax.scatter(x, how.operands[1], new.astype(x.dtype), numbers, **options)


def _select(how: Move, parts: Sequence[jax.Array]) -> jax.Array:
    which = how.operands[0]
    coarse = _coarse(how, parts[0]) if jnp.ndim(which) else []
    uniform = uniform_axes(which, _made) if coarse else ()
    for axis in coarse:
        if axis not in uniform:
            raise MoveError(f"select_n by a mask that may differ along axis {axis}")
        groups = parts[0].shape[axis]
        which = lax.slice_in_dim(which, 0, groups, axis=axis)
    return lax.select_n(which, *parts)


def _made(tracer: Any) -> tuple[str, Mapping[str, Any], Sequence[Any]] | None:
    """Return the primitive that computes a value, its parameters and operands, or None."""
    _, eqn = compat.producer(tracer) if compat.is_staged(tracer) else (None, None)
    return None if eqn is None else (eqn.primitive.name, eqn.params, eqn.in_tracers)


_RULES: dict[str, Callable[[Move, Sequence[jax.Array]], jax.Array]] = {
    "dynamic_update_slice": _dynamic_update_slice,
    "scatter": _scatter,
    "select_n": _select,
}

_SCATTERS = ("scatter", "scatter-add", "scatter-max", "scatter-min", "scatter-mul", "scatter-sub")
WRITTEN = {"dynamic_update_slice": (0, 1), **dict.fromkeys(_SCATTERS, (0, 2))}
"""Primitives that write elements to places, with the operands that hold elements, the updated one
first."""

UPDATES = frozenset(("concatenate", "dynamic_update_slice", "scatter", "select_n"))
"""Primitives that an array proxy follows by writing elements into it."""


def read_by(primitive: str, count: int) -> Sequence[int]:
    """Return the operands that one of ``UPDATES`` reads elements from, the updated one first."""
    return WRITTEN.get(primitive) or data_in(primitive, count)
