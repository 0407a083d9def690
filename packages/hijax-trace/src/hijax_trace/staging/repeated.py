"""Repeated: calls of a jitted function with equal types, made once and then appended."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from .. import compat

_MADE: weakref.WeakKeyDictionary[Any, dict[Hashable, tuple[Any, Any] | None]] = (
    weakref.WeakKeyDictionary()
)


def repeated(fn: Callable[..., Any], static: Sequence[Hashable], *args: Any) -> Any:
    """Call a jitted function; append the equation of an equal call before.

    JAX asks several of its rules and caches at each call of a jitted function. A program with
    hundreds of equal layers does that hundreds of times for one equation. What is kept belongs to
    one trace, so it ends with it.

    Args:
        fn: the function, jitted, which takes ``static`` and then ``args`` by position.
        static: its static arguments.
        args: pytrees of arrays.

    Returns:
        What the function returns.
    """
    trace = compat.current_trace()
    if not compat.is_staging(trace):
        return fn(*static, *args)
    leaves, treedef = jax.tree.flatten(args)
    if not all(isinstance(leaf, jax.Array) for leaf in leaves):
        return fn(*static, *args)
    made = _MADE.setdefault(trace, {})
    types = tuple(map(compat.typeof, leaves))
    key = fn, tuple(static), treedef, types, compat.trace_context()
    if key not in made:
        result = fn(*static, *args)
        results, out = jax.tree.flatten(result)
        eqn = compat.call_of(trace, leaves, results)
        made[key] = None if eqn is None else (eqn, out)
        return result
    kept = made[key]
    if kept is None:
        return fn(*static, *args)
    eqn, out = kept
    return jax.tree.unflatten(out, compat.append(trace, eqn, leaves, compat.current_source()))
