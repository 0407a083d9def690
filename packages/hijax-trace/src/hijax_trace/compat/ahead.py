"""Partial evaluation: what a program computes while it traces a function ahead."""

from __future__ import annotations

from types import FunctionType
from typing import Any

from jax._src import core  # 0.10.2 - 0.12
from jax._src.interpreters import (
    ad,  # 0.10.2 - 0.12
    batching,  # 0.10.2 - 0.12
)
from jax._src.interpreters import partial_eval as pe  # 0.10.2 - 0.12
from jax._src.lax.control_flow import loops as _loops  # 0.10.2 - 0.12

from interception_core.engine_api import SETTLED

AHEAD = "jaxtap.ahead"
"""The name scope of operations that a program computes while it traces a function ahead."""

TRANSPOSED = "jaxtap.transposed"
"""The name scope in which ``jax.linear_transpose`` traces a function."""

evaluate_partially: FunctionType = pe.JaxprTrace.process_primitive
"""Computes a primitive of known operands, and traces one of unknown operands.

Called with the trace, the primitive, its operands and its parameters.
"""

hoist: FunctionType = _loops._scan_known_hoisting
trace_partially: FunctionType = pe.trace_to_jaxpr_nounits
"""Hoists loop invariants out of a differentiated loop. ``hoist`` forgets all name scopes, and calls
``trace_partially``."""


def is_transposing(trace: Any) -> bool:
    """Return whether a trace is that of a function that ``jax.linear_transpose`` transposes."""
    if not isinstance(trace, pe.JaxprTrace):
        return False
    return any(entry.name.startswith(TRANSPOSED) for entry in trace.name_stack.stack)


def _is_ahead(trace: Any) -> bool:
    """Return whether the program evaluates a function partially.

    JAX's rules and transposes also evaluate partially, but do not run the function later.
    """
    if not isinstance(trace, pe.JaxprTrace):
        return False
    names = [entry.name for entry in trace.name_stack.stack]
    return not any(name.startswith((SETTLED, TRANSPOSED)) for name in names)


def unknown_ahead(value: Any) -> bool:
    """Return whether a value is unknown to a partial evaluation.

    An operation on such a value is only traced. If the program runs it, it runs later.
    """
    while isinstance(value, core.Tracer):
        if isinstance(value, pe.JaxprTracer):
            return _is_ahead(value._trace) and not value.is_known()
        if isinstance(value, ad.JVPTracer | ad.LinearizeTracer):
            value = value.primal
        elif isinstance(value, batching.BatchTracer):
            value = value.val
        else:
            return False
    return False


def known_ahead(trace: Any, values: Any) -> list[Any] | None:
    """Return the known operands of a partial evaluation, or None.

    The result is None for other traces, and if an operand is unknown.
    """
    if not _is_ahead(trace):
        return None
    found = [
        value.pval.get_known()
        if isinstance(value, pe.JaxprTracer) and value._trace is trace
        else value
        for value in values
    ]
    return None if any(value is None or unknown_ahead(value) for value in found) else found
