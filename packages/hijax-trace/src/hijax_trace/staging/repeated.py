"""Repeated: calls with equal types, made once in a trace and then appended."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from .. import compat


class _Traces(threading.local):
    """What a thread has made, by trace.

    Not weakly by trace: equations refer to their traces, so that none would ever be released.
    """

    def __init__(self) -> None:
        self.made: dict[Any, dict[Hashable, Any]] = {}

    def of(self, trace: Any) -> dict[Hashable, Any]:
        """Return what was made in a trace. Forget the traces that are not around it.

        A trace that an error left can't be told from one that goes on, but it is around no other.
        """
        found = self.made.get(trace)
        if found is None:
            around = compat.traces_around(trace)
            self.made = {one: self.made[one] for one in around if one in self.made}
            found = self.made[trace] = {}
        return found


_TRACES = _Traces()


class _Context(threading.local):
    """JAX's configuration of a thread when it was last looked at."""

    context: Hashable = None
    token: object = None


_CONTEXT = _Context()


@functools.lru_cache(maxsize=256)
def _interned(context: Hashable) -> object:
    """Return an object that stands for JAX's configuration and is hashed fast."""
    return object()


def context_token() -> object:
    """Return an object that stands for JAX's configuration now.

    To hash the configuration, which has enumerations in it, takes ten times as long as to compare
    it with the one before.
    """
    context = compat.trace_context()
    if context != _CONTEXT.context:
        _CONTEXT.context, _CONTEXT.token = context, _interned(context)
    return _CONTEXT.token


def _keeps(trace: Any) -> bool:
    """Return whether what is made in a trace is kept: not while JAX looks for leaked traces."""
    return compat.is_staging(trace) and not compat.checks_leaks()


def appended(key: Hashable, call: Callable[[], Any], values: Sequence[Any]) -> Any:
    """Call a function that makes one equation, or append it if a call before made it.

    JAX asks several of its rules and caches at each call of a jitted function, and stages a
    function with custom rules again. A program with hundreds of equal layers does that hundreds of
    times for one equation.
    """
    key = key, context_token()
    results = again(key, values)
    if results is None:
        results = call()
        keep(key, values, results)
    return results


def again(key: Hashable, values: Sequence[Any]) -> Any:
    """Append the equation that was kept for a key in the current trace. Return its results.

    None if there is none.
    """
    trace = compat.current_trace()
    known = _TRACES.of(trace).get(key) if _keeps(trace) else None
    if known is None:
        return None
    eqn, structure = known
    results = compat.append(trace, eqn, values, compat.current_source())
    return results if structure is None else jax.tree.unflatten(structure, results)


def keep(key: Hashable, values: Sequence[Any], results: Any) -> None:
    """Keep the equation that made a pytree of results from values, for ``again``."""
    trace = compat.current_trace()
    made = _TRACES.of(trace) if _keeps(trace) else None
    if made is not None and key not in made:
        is_flat = type(results) is list and all(map(_is_array, results))
        leaves, structure = (results, None) if is_flat else jax.tree.flatten(results)
        eqn = compat.call_of(trace, values, leaves)
        made[key] = None if eqn is None else (eqn, structure)


def appended_call(
    trace: Any, source: Any, operands: Sequence[Any], params: dict[str, Any]
) -> Sequence[Any]:
    """Stage a jitted call as it is in a trace, or append the equation of an equal one.

    Args:
        trace: the staging trace.
        source: the source of the call.
        operands: its operands, tracers of the trace.
        params: its parameters.

    Returns:
        The results.
    """
    if not _keeps(trace):
        return compat.keep_call(trace, source, *operands, **params)
    # Calls of a function on equal types share its jaxpr. Their other parameters are compared: by
    # identity at first, as Python does it, and JAX keeps those of equal calls.
    made, key = _TRACES.of(trace), (params["jaxpr"], context_token())
    known = made.get(key)
    if known is not None and known.params == params:
        return compat.append(trace, known, operands, source)
    results = compat.keep_call(trace, source, *operands, **params)
    if (known := compat.call_of(trace, operands, results, inlines=False)) is not None:
        made[key] = known
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
    if not all(map(_is_array, leaves)):
        return fn(*static, *args)
    key = fn, tuple(static), treedef, tuple(map(compat.typeof, leaves))
    return appended(key, lambda: fn(*static, *args), leaves)


def _is_array(value: Any) -> bool:
    return isinstance(value, (compat.Tracer, jax.Array))
