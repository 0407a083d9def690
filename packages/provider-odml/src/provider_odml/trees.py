"""Arguments: arrays, and what else is among them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


def is_array(leaf: Any) -> bool:
    """Return whether a leaf is an array, concrete or abstract."""
    return hasattr(leaf, "shape") and hasattr(leaf, "dtype")


def is_key(leaf: Any) -> bool:
    """Return whether a leaf is an array of typed keys of random numbers."""
    return is_array(leaf) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def split(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """Return a tree's arrays, and a function that puts in others.

    What is not an array (a number, a function that an Equinox module holds) stays where it is.
    """
    leaves, treedef = jax.tree.flatten(tree)
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def rebuild(arrays: Sequence[Any]) -> Any:
        filled = list(leaves)
        for place, array in zip(places, arrays, strict=True):
            filled[place] = array
        return jax.tree.unflatten(treedef, filled)

    return [leaves[place] for place in places], rebuild
