"""Walls: what keeps the converter from mixing integers and floats.

The converter makes an operation integer as soon as a quantized value touches it, also where no
kernel takes it or where the scale does not fit. An optimization barrier stops it, and leaves
nothing in the .tflite.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

FakeQuant = Callable[[jax.Array, str, tuple[float, float] | None], jax.Array]
"""Quantizes a value inside of a form: the value, its name, and its 8-bit range where LiteRT
asks for one."""

INT16_FLOAT = frozenset(
    {
        *("relu6", "clip", "clamp", "gelu", "hard_swish", "hard_silu", "log", "log_softmax"),
        *("concatenate", "stack", "roll", "gather", "take", "dynamic_update_slice", "pad"),
    }
)
"""Operations that the converter has no 16-bit integers for: `clip` where it is to (-1, 1) or
(0, 6), `pad` where it is with another value than 0."""


def unquantized(x: jax.Array, name: str, fixed: tuple[float, float] | None) -> jax.Array:
    """Returns a value inside of a form as it is."""
    return x


def wall(x: Any) -> Any:
    """Returns a value such that what is behind it is converted apart from what is before it.

    It belongs between a quantized value and each consumer that is not integer at the value's own
    scale: a float operation, or a second fake quantization.
    """
    return lax.optimization_barrier(x)


def island(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function as float operations between a DEQUANTIZE and a QUANTIZE.

    Args:
        fn: the function. Its float arrays among the positional arguments get a wall, and so do
            those that it returns.
    """

    @functools.wraps(fn)
    def walled(*args: Any, **kwargs: Any) -> Any:
        return jax.tree.map(_float_wall, fn(*jax.tree.map(_float_wall, args), **kwargs))

    return walled


def int16_refuses(name: str, shapes: Sequence[tuple[int, ...]] = ()) -> bool:
    """Returns whether an operation on 16-bit values has to be an island.

    Args:
        name: of the operation, such as ``"gelu"``.
        shapes: those of its operands, for `add`: the converter takes it without broadcasting.
    """
    return name in INT16_FLOAT or (name == "add" and len(set(shapes)) > 1)


def _float_wall(x: Any) -> Any:
    is_array = isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jnp.floating)
    return wall(x) if is_array else x
