"""Repeated: calls with equal types, made once in a trace and then appended."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from .. import compat

# By trace, since what is kept ends with it.
_MADE: weakref.WeakKeyDictionary[Any, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


def appended(
    key: Hashable, call: Callable[[], Sequence[Any]], values: Sequence[Any]
) -> Sequence[Any]:
    """Call a function that makes one equation, or append it if a call before made it.

    JAX asks several of its rules and caches at each call of a jitted function. A program with
    hundreds of equal layers does that hundreds of times for one equation.

    Args:
        key: what the equation depends on, types of the operands included.
        call: makes the equation. Returns its results.
        values: its operands.

    Returns:
        The results.
    """
    trace = compat.current_trace()
    if not compat.is_staging(trace):
        return call()
    made = _MADE.setdefault(trace, {})
    key = key, compat.trace_context()
    eqn = made.get(key)
    if eqn is not None:
        return compat.append(trace, eqn, values, compat.current_source())
    results = call()
    if key not in made:
        made[key] = compat.call_of(trace, values, results)
    return results


def repeated(fn: Callable[..., Any], static: Sequence[Hashable], *args: Any) -> Any:
    """Call a jitted function; append the equation of an equal call before.

    Args:
        fn: the function, jitted, which takes ``static`` and then ``args`` by position.
        static: its static arguments.
        args: pytrees of arrays.

    Returns:
        What the function returns.
    """
    leaves, treedef = jax.tree.flatten(args)
    if not compat.is_staging(compat.current_trace()) or not all(map(_is_array, leaves)):
        return fn(*static, *args)
    structure: Any = None

    def call() -> list[Any]:
        nonlocal structure
        results, structure = jax.tree.flatten(fn(*static, *args))
        return results

    key = fn, tuple(static), treedef, tuple(map(compat.typeof, leaves))
    results = appended(key, call, leaves)
    made = _MADE[compat.current_trace()]
    known = made.setdefault(("structure", key), structure)
    return jax.tree.unflatten(known if structure is None else structure, results)


def _is_array(value: Any) -> bool:
    return isinstance(value, (compat.Tracer, jax.Array))
