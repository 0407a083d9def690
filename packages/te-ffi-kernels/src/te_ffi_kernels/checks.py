"""Checks of arguments, whose errors name the op and the argument."""

from __future__ import annotations

import enum
import numbers
from collections.abc import Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)
_Member = TypeVar("_Member", bound=enum.Enum)


def dtype(op: str, name: str, given: DTypeLike, allowed: Sequence[Any]) -> Any:
    """Return the dtype, which must be one of `allowed`."""
    found = jnp.dtype(given)
    if found not in allowed:
        raise TypeError(
            f"{op}: {name} must be "
            f"{' or '.join(jnp.dtype(one).name for one in allowed)}, got {found.name}"
        )
    return found


def shape(op: str, name: str, array: jax.Array, wanted: tuple[int, ...], why: str = "") -> None:
    """Raise where an array has another shape."""
    if array.shape != wanted:
        why = why and f", {why}"
        raise ValueError(f"{op}: {name} must have shape {wanted}{why}, got {array.shape}")


def member(
    op: str, name: str, given: Any, kind: type[_Member], refused: Sequence[Any] = ()
) -> _Member:
    """Return an enumeration's member for a member, value or name.

    The error doesn't list the members in `refused`, which the caller refuses.
    """
    if isinstance(given, str) and given.upper() in kind.__members__:
        return kind[given.upper()]
    try:
        return kind(getattr(given, "value", given))
    except ValueError:
        names = ", ".join(one.name for one in kind if one not in refused)
        raise ValueError(f"{op}: {name} must be one of: {names}, got {given!r}") from None


def number(op: str, name: str, given: Any) -> float:
    """Return a real number, finite or not."""
    if isinstance(given, numbers.Real):
        return float(given)
    raise TypeError(
        f"{op}: {name} must be a number of Python or NumPy, got "
        f"{type(given).__name__}. It is part of the compiled program."
    )
