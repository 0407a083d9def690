"""Walls: what keeps the converter from mixing integers and floats.

The converter makes an operation integer as soon as a quantized value touches it, also where no
kernel takes it or where the scale does not fit. An optimization barrier stops it, and leaves
nothing in the .tflite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

FakeQuant = Callable[[jax.Array, str, tuple[float, float] | None], jax.Array]
"""Quantizes a value inside of a form: the value, its name, and its 8-bit range where LiteRT
asks for one."""


def unquantized(x: jax.Array, name: str, fixed: tuple[float, float] | None) -> jax.Array:
    """Return a value inside of a form as it is."""
    return x


def wall(x: Any) -> Any:
    """Return a value that the converter does not look through.

    It belongs between a quantized value and each consumer that is not integer at the value's own
    scale: a float operation, or a second fake quantization.
    """
    return lax.optimization_barrier(x)


def island(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function as float operations between a DEQUANTIZE and a QUANTIZE.

    Args:
        fn: the function. Its float arrays among the positional arguments get a wall, and so do
            those that it returns.
    """

    @functools.wraps(fn)
    def walled(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(_float_wall, fn(*jax.tree.map(_float_wall, args), **kwargs))

    return walled


def _float_wall(x: Any) -> Any:
    is_array = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    return wall(x) if is_array else x
