"""Scope: the traces and runs in which a Box is used.

A Box belongs to the trace that it was made in, if any. It may be read and written in all traces
inside of that one. Its type may change in its own trace, and in a function that
``hijax_trace.jit`` traces, which returns the new contents.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import jax

from .. import compat
from . import guard

_LOOPS = {"scan": "scan", "while_body": "while_loop", "while_cond": "while_loop"}


class BoxFound(BaseException):
    """Ends a call that assumed that no argument holds a Box."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.runs: list[Any] = []
        self.collected: list[Any] | None = None
        self.none_expected = False
        self.lifted: frozenset[str] = frozenset()


LOCAL = _Local()
"""Of this thread: the runs that are being traced, the Boxes that ``collect`` found, whether
flattening a Box must raise ``BoxFound``, and the mesh axes of ``lifting``."""


def home_trace() -> Any:
    """Return the current trace, or None outside of all traces."""
    trace = compat.current_trace()
    return None if compat.is_eval(trace) else trace


def traces_up_to(home: Any) -> list[Any]:
    """Return the traces from the current one outwards, without ``home``.

    A trace that builds a jaxpr is the last, because it does not know the traces around it.

    Raises:
        RuntimeError: ``home`` is not around the current trace, so it has ended.
    """
    between = []
    trace = compat.current_trace()
    while trace is not home and not compat.is_eval(trace):
        between.append(trace)
        if compat.is_staging(trace):
            return between
        trace = compat.parent_trace(trace)
    if home is not None and trace is not home:
        raise escaped_error()
    return between


def staging_in(traces: list[Any]) -> Any:
    """Return the trace that builds a jaxpr among traces, or None."""
    return next(filter(compat.is_staging, traces), None)


def shard_axes() -> frozenset[str]:
    """Return the mesh axes of the ``shard_map`` around."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


@contextlib.contextmanager
def lifting() -> Iterator[None]:
    """Let the program of a ``shard_map`` close over Boxes from outside.

    Whoever stages the program makes what it closes over an operand.
    """
    before, LOCAL.lifted = LOCAL.lifted, shard_axes()
    try:
        yield
    finally:
        LOCAL.lifted = before


def check_not_sharded(axes: frozenset[str]) -> None:
    """Refuse a closed-over Box inside of ``shard_map``.

    Raises:
        NotImplementedError: a ``shard_map`` is between.
    """
    if not (here := shard_axes()) <= axes and here != LOCAL.lifted:
        raise NotImplementedError(
            "A Box that is used inside of shard_map must be an argument, as JAX's references "
            "must, got one that is closed over. Pass the Box to the function with a spec "
            "(in_specs=P() if each device has all of it), put it on the mesh "
            "(Box(jax.device_put(value, sharding))), and call it under jit."
        )


def check_unmixed(leaves: list, between: list[Any]) -> None:
    """Refuse values of inner traces for a Box of an outer trace.

    Raises:
        TypeError: a value is differentiated or mapped, and the Box is not.
    """
    for leaf in leaves:
        trace = compat.trace_of(leaf)
        if trace is not None and any(trace is inner for inner in between):
            kind = compat.traced_for(trace)
            raise TypeError(guard.VMAPPED if kind == "vmap" else guard.STOP_GRADIENT)


def frozen_error(old: Any, new: Any, trace: Any, passed: bool) -> TypeError:
    """Return the error for a change of a fixed type."""
    kind = compat.traced_for(trace) if trace is not None else "a transformation"
    if kind in _LOOPS:
        return TypeError(
            f"A Box must keep its type in a loop, which is {old}, got a value of type {new} in the "
            f"body of {_LOOPS[kind]}. Give the Box its final type before the loop."
        )
    if kind == "cond":
        return TypeError(
            f"A Box must keep its type in a branch of cond, which is {old}, got a value of type "
            f"{new} in one branch. Give the Box its final type before, or return the value and "
            "write it after cond."
        )
    how = "passed into" if passed else "used in"
    return TypeError(
        f"A Box must keep its type, which is {old} and fixed inside of {kind}, got a value of type "
        f"{new} where the Box was {how} {kind} from outside. Use hijax_trace.jit, which returns "
        "the new contents, or keep structure, shapes and dtypes."
    )


def captured_error(old: Any, new: Any, label: str) -> TypeError:
    """Return the error for a type that a plain trace has fixed."""
    return TypeError(
        f"A Box must keep its type, which is {old} and fixed since {label} used it from outside, "
        f"got a value of type {new}. The program that JAX keeps of {label} would use the old "
        "contents. Use hijax_trace.jit there, pass the Box as an argument, or make a new Box."
    )


def escaped_error() -> RuntimeError:
    """Return the error for a Box whose trace has ended."""
    return RuntimeError(
        "A Box must be used inside of the function that JAX traced it in, got one that escaped its "
        "trace. Return box.get() from the function, return the Box itself from a function under "
        "hijax_trace.jit, or make the Box outside and write to it."
    )
