"""Operands of ops: a QArray, another form of one, or floats."""

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp

from quant_numerics.array.qarray import QArray
from quant_numerics.array.stored import is_form
from quant_numerics.formats.dtypes import float_dtype

Operand: TypeAlias = Any
"""What ops take: a QArray, another StoredForm, or a float array."""


_OTHERS: dict[type, tuple[Callable[[Any], QArray], Callable[[Any], jax.Array]]] = {}


def register_operand(
    form: type, to_qarray: Callable[[Any], QArray], restore: Callable[[Any], jax.Array]
) -> None:
    """Let ops and ``dequantize`` take values of a class or JAX type that is no ``StoredForm``.

    Args:
      form: the class of values, or of the types of traced values.
      to_qarray: makes QArrays of them.
      restore: dequantizes them.
    """
    _OTHERS[form] = to_qarray, restore


def _other(x: Any) -> Any:
    """Return how a value of a registered class becomes a QArray and an array; None for others."""
    return _OTHERS.get(type(jax.typeof(x)) if isinstance(x, jax.core.Tracer) else type(x))


def dequantize(q: Operand) -> jax.Array:
    """Dequantize a QArray, or another stored form, to an array of its shape and logical dtype.

    Each value is multiplied by its scale in float32 (float64 for logical float64), then rounded.
    In a slice with an infinity or a NaN every element is non-finite: infinities keep their sign,
    the rest is NaN.

    Args:
      q: a QArray, or another form of one.

    Raises:
      TypeError: `q` is neither a QArray nor another form of one.
    """
    if is_form(q):
        return q.restore()
    if (other := _other(q)) is not None:
        return other[1](q)
    raise TypeError(
        f"what dequantize takes must be a QArray, got {type(q).__name__}. Use arrays as they are."
    )


def as_operand(x: Any, what: str) -> QArray | jax.Array:
    """Return `x` as a QArray or a float array, or raise TypeError, with its name."""
    if is_form(x):
        return found if isinstance(found := x.unpacked(), QArray) else x.restore()
    if (other := _other(x)) is not None:
        return other[0](x)
    x = jnp.asarray(x)
    float_dtype(x.dtype, f"{what}, where not a QArray,")
    return x
