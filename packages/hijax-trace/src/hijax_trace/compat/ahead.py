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

LINEARIZED = TRANSPOSED + ".rule"
"""The name scope in which JAX traces the rule of a ``custom_jvp`` function, to transpose it.

What does not depend on tangents is computed meanwhile.
"""

linearize: FunctionType = ad.linearize_from_jvp
"""Computes a rule of primals, and traces what it does to tangents."""

evaluate_partially: FunctionType = pe.JaxprTrace.process_primitive
"""Computes a primitive of known operands, and traces one of unknown operands.

Called with the trace, the primitive, its operands and its parameters.
"""

hoist: FunctionType = _loops._scan_known_hoisting
trace_partially: FunctionType = pe.trace_to_jaxpr_nounits
"""Hoists loop invariants out of a differentiated loop. ``hoist`` forgets all name scopes, and calls
``trace_partially``."""


def is_transposing(trace: Any) -> bool:
    """Return whether JAX transposes the function that a trace is of: see ``TRANSPOSED``."""
    return any(name.startswith(TRANSPOSED) for name in _names(trace))


def _names(trace: Any) -> list[str]:
    """Return the names of the scopes in which a partial evaluation began; none for others."""
    if not isinstance(trace, pe.JaxprTrace):
        return []
    return [entry.name for entry in trace.name_stack.stack]


def _is_ahead(trace: Any) -> bool:
    """Return whether the program evaluates a function partially.

    JAX's rules and transposes also evaluate partially, but do not run the function later.
    """
    names = _names(trace)
    return isinstance(trace, pe.JaxprTrace) and not any(
        name.startswith((SETTLED, TRANSPOSED)) for name in names
    )


def unknown_ahead(value: Any) -> bool:
    """Return whether a value is unknown to a partial evaluation.

    An operation on such a value is only traced. If the program runs it, it runs later.
    """
    trace = _trace_of_unknown(value)
    return trace is not None and _is_ahead(trace)


def is_tangent(value: Any) -> bool:
    """Return whether a value is, or is computed from, a tangent in the rule of a ``custom_jvp``."""
    return LINEARIZED in _names(_trace_of_unknown(value))


def _trace_of_unknown(value: Any) -> Any:
    """Return the partial evaluation that does not know a value, or None."""
    while isinstance(value, core.Tracer):
        if isinstance(value, pe.JaxprTracer):
            return None if value.is_known() else value._trace
        if isinstance(value, ad.JVPTracer | ad.LinearizeTracer):
            value = value.primal
        elif isinstance(value, batching.BatchTracer):
            value = value.val
        else:
            return None
    return None


def known_ahead(trace: Any, values: Any) -> list[Any] | None:
    """Return the known operands of a partial evaluation, or None.

    The result is None for other traces, and if an operand is unknown.
    """
    if not _is_ahead(trace) and LINEARIZED not in _names(trace):
        return None
    found = [
        value.pval.get_known()
        if isinstance(value, pe.JaxprTracer) and value._trace is trace
        else value
        for value in values
    ]
    unknown = (value is None or _trace_of_unknown(value) is not None for value in found)
    return None if any(unknown) else found
