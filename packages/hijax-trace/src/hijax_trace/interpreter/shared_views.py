"""Shared views: values that a program cuts out of one array, and where in it they lie."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .. import compat


class StridedView(NamedTuple):
    """Where a view lies in a row-major array.

    Attributes:
        offset: where its first element is, in elements.
        strides: for each axis, the elements from one index to the next.
    """

    offset: int
    strides: tuple[int, ...]


def shared_array(values: Sequence[Any]) -> tuple[Any, list[StridedView]] | None:
    """Return the array that values are cut out of, and where in it they lie.

    A kernel that reads parts of an array in place need not wait for copies of them.

    Args:
        values: arrays, which the program may have sliced, split, transposed or reshaped.

    Returns:
        The array, and for each value where it lies. None for values that have no such array in the
        program that is being staged, or that are not regular parts of it.
    """
    chains = [_chain(value) for value in values]
    others = [{id(compat.producer(one)[0]) for one in chain} for chain in chains[1:]]
    for source in chains[0]:
        var = id(compat.producer(source)[0])
        if all(var in other for other in others):
            break
    else:
        return None
    memory = np.empty(source.shape, np.int8)  # looked at, and never touched
    lying = []
    for chain in chains:
        place = [id(compat.producer(one)[0]) for one in chain].index(var)
        view = memory
        for value in reversed(chain[:place]):
            made, eqn = compat.producer(value)
            which = next(i for i, out in enumerate(eqn.outvars) if out is made)
            view = _VIEWS[eqn.primitive.name](view, eqn.params, which)
            if not np.may_share_memory(view, memory):  # NumPy had to copy
                return None
        lying.append(StridedView(_address(view) - _address(memory), view.strides))
    return source, lying


def _chain(value: Any) -> list[Any]:
    """Return a value, what it is a view of, what that is a view of, and so on."""
    chain = []
    while compat.is_staged(value):
        chain.append(value)
        _, eqn = compat.producer(value)
        if eqn is None or eqn.primitive.name not in _VIEWS:
            break
        value = eqn.in_tracers[0]
    return chain


def _address(view: np.ndarray) -> int:
    return view.__array_interface__["data"][0]


def _sliced(view: np.ndarray, params: dict[str, Any], which: int) -> np.ndarray:
    strides = params["strides"] or (1,) * view.ndim
    bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
    return view[tuple(slice(*bound) for bound in bounds)]


def _split(view: np.ndarray, params: dict[str, Any], which: int) -> np.ndarray:
    return np.split(view, np.cumsum(params["sizes"])[:-1], params["axis"])[which]


_VIEWS: dict[str, Callable[[np.ndarray, dict[str, Any], int], np.ndarray]] = {
    "reshape": lambda view, params, which: view.reshape(params["new_sizes"]),
    "slice": _sliced,
    "split": _split,
    "squeeze": lambda view, params, which: view.squeeze(params["dimensions"]),
    "transpose": lambda view, params, which: view.transpose(params["permutation"]),
    "unstack": lambda view, params, which: np.moveaxis(view, params["axis"], 0)[which],
}
"""By primitive: what result number ``which`` is of its operand."""
