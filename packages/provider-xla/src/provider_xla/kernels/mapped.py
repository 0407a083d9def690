"""Contractions under ``vmap``: a batch's rows are rows, mapped columns columns.

Programs with named axes map a weight over the axes that are not contracted, so that what they
multiply is a vector. A kernel multiplies with the whole weight all the same, once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap

from .added import NOTHING, Added

Run = Callable[[jax.Array, Any, Added], jax.Array]
"""Multiplies [*rows, K] with a packed weight, and adds to the product, to [*rows, N]."""


def mapped_contraction(run: Run, n_sizes: Sequence[int], gone: Sequence[int]) -> Callable[..., Any]:
    """Return a contraction with some packed columns, with a ``vmap`` rule.

    Args:
        run: multiplies with all of them.
        n_sizes: the sizes of the axes of columns.
        gone: the axes of columns of which one index is taken. A ``vmap`` over all indices of one
            takes them in their order.

    Returns:
        A function of x [*rows, K], the packed weight, what is added to [*rows, N], and an index
        int32[] for each axis in ``gone``. It returns [*rows, *n_sizes] without those axes.
    """

    def one(x: jax.Array, weight: Any, added: Added, places: Sequence[jax.Array]) -> jax.Array:
        y = run(x, weight, added).reshape(*x.shape[:-1], *n_sizes)
        for part, place in sorted(zip(gone, places, strict=True), key=lambda pair: -pair[0]):
            y = lax.dynamic_index_in_dim(y, place, x.ndim - 1 + part, keepdims=False)
        return y

    wrapped = custom_vmap(one)

    def rule(
        size: int, in_batched: Any, x: jax.Array, weight: Any, added: Added, places: Any
    ) -> Any:
        is_rows, of_weight, of_added, of_places = in_batched
        mapped = [i for i, is_mapped in enumerate(of_places) if is_mapped]
        axes = jax.tree.map(lambda is_mapped: 0 if is_mapped else None, in_batched)
        if not any(jax.tree.leaves(of_weight)):
            if not mapped and not is_rows:  # only what is added differs: multiply once
                y = wrapped(x, weight, NOTHING, places)
                return jax.vmap(lambda added: added.to(y), axes[2:3], axis_size=size)(added), True
            if not mapped:
                inside, after = added.in_batch(of_added, size, x.shape[1:-1])
                return sum(after, wrapped(x, weight, inside, places)), True
            first, *others = mapped
            part = gone[first]
            # A map over all columns of an axis is that axis of one call's result.
            if not others and not is_rows and size == n_sizes[part]:
                rest = [i for i in range(len(gone)) if i != first]
                left = [gone[i] for i in rest]
                run_all = mapped_contraction(run, n_sizes, left)
                y = run_all(x, weight, added, [places[i] for i in rest])
                axis = x.ndim - 1 + part - sum(other < part for other in left)
                return jnp.moveaxis(y, axis, 0), True
        return jax.vmap(one, tuple(axes), axis_size=size)(x, weight, added, places), True

    wrapped.def_vmap(rule)
    return wrapped
