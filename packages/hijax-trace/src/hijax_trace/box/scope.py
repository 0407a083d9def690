"""Where a Box is used: traces, and the runs of ``hijax_trace.jit`` that are being traced.

A Box belongs to the trace that it was made in, or to none. It may be read and written from every
trace inside of that one. Its type may change in its own trace, and in a function traced by
``hijax_trace.jit``, which hands the new contents out.
"""

from __future__ import annotations

import threading
from typing import Any

from .. import compat
from . import guard

_LOOPS = {"scan": "scan", "while_body": "while_loop", "while_cond": "while_loop"}


class BoxFound(BaseException):
    """Ends a call that was made on the assumption that no argument holds a Box."""


class _Local(threading.local):
    def __init__(self) -> None:
        self.runs: list[Any] = []
        self.collected: list[Any] | None = None
        self.none_expected = False


LOCAL = _Local()
"""The runs being traced on this thread, the Boxes found by ``collect``, and if one may be."""


def home_trace() -> Any:
    """Return the current trace, or None outside of any."""
    trace = compat.current_trace()
    return None if compat.is_eval(trace) else trace


def traces_up_to(home: Any) -> list[Any]:
    """Return the traces from the current one outwards, up to but without ``home``.

    Beyond a trace that builds a jaxpr nothing is known, so that one is the last.

    Raises:
        RuntimeError: ``home`` is not among them, so it is over.
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
    """Return the trace among them that builds a jaxpr, if any."""
    return next(filter(compat.is_staging, traces), None)


def check_not_sharded(traces: list[Any]) -> None:
    """Refuse a Box inside of ``shard_map`` that wasn't passed to it.

    Raises:
        NotImplementedError: one of the traces is for ``shard_map``.
    """
    if any(compat.traced_for(trace) == "shard_map" for trace in traces):
        raise NotImplementedError(
            "a Box from outside was used inside of shard_map, where JAX's references must be "
            "arguments. Pass the Box to the function with a spec (in_specs=P() if each device has "
            "all of it), put it on the mesh (Box(jax.device_put(value, sharding))), and call it "
            "under jit."
        )


def check_unmixed(leaves: list, between: list[Any]) -> None:
    """Refuse values of inner traces for a Box that belongs to an outer one.

    Raises:
        TypeError: a leaf is differentiated or mapped where the Box is not.
    """
    for leaf in leaves:
        trace = compat.trace_of(leaf)
        if trace is not None and any(trace is inner for inner in between):
            kind = compat.traced_for(trace)
            raise TypeError(guard.VMAPPED if kind == "vmap" else guard.STOP_GRADIENT)


def frozen_error(old: Any, new: Any, trace: Any, passed: bool) -> TypeError:
    """Return the error for a change of type where none is possible."""
    kind = compat.traced_for(trace) if trace is not None else "a transformation"
    change = f"this Box holds {old}, and {new} was written to it"
    if kind in _LOOPS:
        return TypeError(
            f"type change in a loop: {change} in the body of {_LOOPS[kind]}, where each step must "
            "leave the types as they were. Give the Box its final type before the loop."
        )
    if kind == "cond":
        return TypeError(
            f"type change in a branch of cond: {change} in one branch, and the other ones don't. "
            "Give the Box its final type before, or return the value and write it after cond."
        )
    how = "passed into" if passed else "used in"
    return TypeError(
        f"the type of a Box is fixed inside of {kind}: {change} where it was {how} {kind} from "
        "outside. Use hijax_trace.jit, which carries the new contents out, or keep structure, "
        "shapes and dtypes."
    )


def captured_error(old: Any, new: Any, label: str) -> TypeError:
    """Return the error for a change of type after a plain trace has captured the Box."""
    return TypeError(
        f"the type of this Box is fixed since {label} used it from outside: {old} can't become "
        f"{new}, for the program that JAX keeps of {label} would go on using the old contents. Use "
        "hijax_trace.jit there, pass the Box as an argument, or make a new Box."
    )


def escaped_error() -> RuntimeError:
    """Return the error for a Box that outlived its trace."""
    return RuntimeError(
        "a Box escaped its trace: it was made, or passed, inside of a function that JAX traced, "
        "and used after that. Return box.get() from the function, return the Box itself from a "
        "function under hijax_trace.jit, or make the Box outside and write to it."
    )
