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


_FORMS: dict[type, Callable[[Any], QArray]] = {}
_RESTORED: dict[type, Callable[[Any], jax.Array]] = {}


def register_operand(
    form: type,
    to_qarray: Callable[[Any], QArray],
    restore: Callable[[Any], jax.Array] | None = None,
) -> None:
    """Let ops and ``dequantize`` take values of a class or JAX type that is no ``StoredForm``.

    Args:
      form: the class of values, or of the types of traced values.
      to_qarray: makes QArrays of them.
      restore: dequantizes them; by default they are dequantized as QArrays.
    """
    _FORMS[form] = to_qarray
    if restore is not None:
        _RESTORED[form] = restore


def _form(x: Any) -> type:
    return type(jax.typeof(x)) if isinstance(x, jax.core.Tracer) else type(x)


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
    if (restore := _RESTORED.get(_form(q))) is not None:
        return restore(q)
    if (to_qarray := _FORMS.get(_form(q))) is not None:
        return to_qarray(q).restore()
    raise TypeError(
        f"what dequantize takes must be a QArray, got {type(q).__name__}. Use arrays as they are."
    )


def as_operand(x: Any, what: str) -> QArray | jax.Array:
    """Return `x` as a QArray or a float array, or raise TypeError, with its name."""
    if is_form(x):
        return found if isinstance(found := x.unpacked(), QArray) else x.restore()
    if (to_qarray := _FORMS.get(_form(x))) is not None:
        return to_qarray(x)
    x = jnp.asarray(x)
    float_dtype(x.dtype, f"{what}, where not a QArray,")
    return x
