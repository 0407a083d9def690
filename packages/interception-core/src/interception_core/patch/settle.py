"""Settle: arguments as a function of JAX reads them, first of all.

JAX takes any iterable of numbers for a padding or a shape, such as a generator, and reads it once.
A handler reads it as well, and an engine may call the function again. JAX also takes an object with
``__jax_array__``, such as a variable of Flax NNX, for the array which that returns: a handler sees
the operands that the function computes with.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, MappingView, Sequence
from typing import Any

import jax

_OF_ARRAYS = jax.core.ShapedArray
_FIXED = (tuple, list, str, bytes, bytearray, memoryview)


def settled_call(args: tuple, kwargs: dict, takes_arrays: bool) -> tuple[tuple, dict]:
    """Return the arguments of a call, each settled; see ``settle``."""
    if kwargs:
        named = {name: settle(value, takes_arrays) for name, value in kwargs.items()}
        kwargs = kwargs if _are_same(named.values(), kwargs.values()) else named
    return settle(args, takes_arrays), kwargs


def settle(value: Any, takes_arrays: bool = False) -> Any:
    """Return an argument with its iterators and unusual sequences as tuples.

    Args:
        value: the argument. Tuples, lists and dictionaries are searched; a sequence of another
            type that is a pytree stays as it is.
        takes_arrays: whether objects, but for those in dictionaries, become their arrays.
    """
    kind = type(value)
    if kind is tuple or kind is list:
        found = [settle(part, takes_arrays) for part in value]
        return value if _are_same(found, value) else kind(found)
    if kind is dict:
        named = {name: settle(part) for name, part in value.items()}
        return value if _are_same(named.values(), value.values()) else named
    may_have_array, is_tracer, is_read_once, is_unusual = _traits(kind)
    # Tracers have the attribute, too: it is None unless their type has an array, as those of arrays
    # have not. Variables of NNX have the type of their array, and have one.
    if takes_arrays and may_have_array and not (is_tracer and type(value.aval) is _OF_ARRAYS):
        array = value.__jax_array__
        if array is not None:
            return array()
    if not is_read_once and not (is_unusual and jax.tree_util.all_leaves([value])):
        return value
    return tuple(map(settle, value))


def _are_same(found: Any, given: Any) -> bool:
    return all(map(operator.is_, found, given))


# By type, because asking an abstract base class costs more than the rest of a tapped call's look.
@functools.lru_cache(maxsize=512)
def _traits(kind: type) -> tuple[bool, bool, bool, bool]:
    """Return whether a type may have an array, is a tracer, is read once, is an unusual sequence.

    Neither JAX nor a key of calls knows an unusual one.
    """
    is_unusual = issubclass(kind, Sequence | MappingView) and not issubclass(kind, _FIXED)
    is_tracer = issubclass(kind, jax.core.Tracer)
    return hasattr(kind, "__jax_array__"), is_tracer, issubclass(kind, Iterator), is_unusual
