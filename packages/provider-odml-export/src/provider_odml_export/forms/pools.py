"""Pools as MAX_POOL_2D and AVERAGE_POOL_2D."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Padding = str | Sequence[tuple[int, int]]


def avg_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
    count_include_pad: bool = True,
) -> jax.Array:
    """Return ``flax.linen.avg_pool``.

    AVERAGE_POOL_2D does not count its padding: padding that counts is a separate PAD. One
    axis is pooled as two. Averages over more axes are float, and so are those at explicit
    padding that does not count.
    """
    x, window, steps, pads, restore = _in_2d(inputs, window_shape, strides, padding)
    if count_include_pad and pads != "VALID":
        around = _explicit(x, window, steps, pads)
        x, pads = jnp.pad(x, around), "VALID"
    total = _reduce(x, 0, lax.add, window, steps, pads)
    if count_include_pad or pads == "VALID":
        return restore(total / np.prod(window, dtype=x.dtype))
    ones = jnp.ones((*x.shape[:-1], 1), x.dtype)
    return restore(total / _reduce(ones, 0, lax.add, window, steps, pads))


def max_pool(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None = None,
    padding: Padding = "VALID",
) -> jax.Array:
    """Return ``flax.linen.max_pool``. One axis is pooled as two."""
    x, window, steps, pads, restore = _in_2d(inputs, window_shape, strides, padding)
    return restore(_reduce(x, -np.inf, lax.max, window, steps, pads))


def _reduce(x: jax.Array, start: float, fn: Any, window: Any, steps: Any, pads: Any) -> jax.Array:
    return lax.reduce_window(x, np.asarray(start, x.dtype), fn, window, steps, pads)


def _in_2d(
    inputs: jax.Array,
    window_shape: Sequence[int],
    strides: Sequence[int] | None,
    padding: Padding,
) -> tuple[jax.Array, tuple[int, ...], tuple[int, ...], Any, Callable[[jax.Array], jax.Array]]:
    """Return a pool's arguments in 2-D, and the way back."""
    window, count = tuple(window_shape), len(window_shape)
    steps = (1,) * count if strides is None else tuple(strides)
    pads: Any = padding
    batch = inputs.shape[: inputs.ndim - count - 1]
    x = inputs.reshape(int(np.prod(batch)), *inputs.shape[len(batch) :])
    if count == 1:
        x, window, steps = x[:, None], (1, *window), (1, *steps)
        pads = pads if isinstance(pads, str) else ((0, 0), *pads)
    if not isinstance(pads, str):
        pads = ((0, 0), *pads, (0, 0))

    def restore(y: jax.Array) -> jax.Array:
        y = y[:, 0] if count == 1 else y
        return y.reshape(*batch, *y.shape[1:])

    return x, (1, *window, 1), (1, *steps, 1), pads, restore


def _explicit(x: jax.Array, window: Any, steps: Any, pads: Any) -> Any:
    return lax.padtype_to_pads(x.shape, window, steps, pads) if isinstance(pads, str) else pads
