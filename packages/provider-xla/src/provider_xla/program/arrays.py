"""Call a function with its arrays alone, as JAX's transformations need."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array, or the type of one."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def of_arrays(
    fn: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Callable[[Sequence[Any]], list[Any]], list[Any]]:
    """Return ``fn`` as a function of its arguments' arrays, and the arrays.

    A leaf that is not an array (a string, an activation function) stays what it is. The function
    returns the arrays of the result.
    """
    flat, treedef = jax.tree.flatten((list(args), dict(kwargs)))
    places = [i for i, leaf in enumerate(flat) if is_array(leaf)]
    rest = [None if is_array(leaf) else leaf for leaf in flat]

    def call(arrays: Sequence[Any]) -> list[Any]:
        merged = list(rest)
        for place, array in zip(places, arrays, strict=True):
            merged[place] = array
        args, kwargs = jax.tree.unflatten(treedef, merged)
        return [leaf for leaf in jax.tree.leaves(fn(*args, **kwargs)) if is_array(leaf)]

    return call, [flat[i] for i in places]
