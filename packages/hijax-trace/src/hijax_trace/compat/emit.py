"""Emitting: equations made again, with their source and name stack."""

from __future__ import annotations

import weakref
from collections.abc import Container, Sequence
from typing import Any

from jax._src import api_util as _api_util  # 0.10.2 - 0.12
from jax._src import core  # 0.10.2 - 0.12
from jax._src import dtypes as _dtypes  # 0.10.2 - 0.12
from jax._src import source_info_util as _source_info  # 0.10.2 - 0.12
from jax._src.interpreters import partial_eval as pe  # 0.10.2 - 0.12

from .hijax import call_hi_primitive_p
from .jaxpr import consts_of, holds_jaxprs, open_of
from .pjit import _EARLY, SharedParams, custom_jvp_call_p, jit_p
from .trace import is_staged_in, producer
from .traced_prims import is_jvp_prim, is_staged_as_is


def scopes_of(stack: Any) -> list[str]:
    """Return the names of a name stack's scopes, outermost first."""
    return [entry.name for entry in stack.stack if type(entry) is _source_info.Scope]


def name_scope(name: str) -> Any:
    """Return a context manager that opens a name scope."""
    return _source_info.set_name_stack(_source_info.current_name_stack().extend(name))


current_stack = _source_info.current_name_stack
"""Returns the name stack that is open now."""
current_source = _source_info.current
"""Returns the source that equations made now get."""


def stack_without(stack: Any, names: Container[str]) -> Any:
    """Return the name stack without some of its scopes."""
    kept = [entry for entry in stack.stack if entry.name not in names]
    return _source_info.NameStack(tuple(kept))


def info_of(eqn: Any, outer: Any, stack: Any) -> Any:
    """Return the source for an equation that is made again.

    Args:
        outer: the source of the call that it is inlined for, as JAX has it, or None.
    """
    info = eqn.source_info if outer is None else outer
    return info if info.name_stack is stack else info.replace(name_stack=stack)


def at(info: Any) -> Any:
    """Return a context manager that sets the source of operations."""
    return _source_info.user_context(info.traceback, name_stack=info.name_stack)


def rebind(eqn: Any, values: Sequence[Any], info: Any) -> Sequence[Any]:
    """Bind an equation again. Return its results."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with at(info), eqn.ctx.manager:
        try:
            result = eqn.primitive.bind(*values, **params)
        except _api_util.InternalFloatingPointError as error:  # jax_debug_nans
            name = eqn.params.get("name", eqn.primitive.name)
            raise FloatingPointError(f"invalid value ({error.ty}) encountered in {name}") from None
    return result if eqn.primitive.multiple_results else (result,)


def can_append(eqn: Any, inlines: bool = True) -> bool:
    """Return whether an equation may be appended to a jaxpr as is.

    The types of its results are known then, and no JAX rule must run again.

    Args:
        eqn: the equation.
        inlines: whether calls that JAX inlines are inlined in the jaxpr, and not kept.
    """
    if eqn.effects or eqn.primitive.ref_allocating:
        return False
    if eqn.primitive is call_hi_primitive_p:
        return is_staged_as_is(eqn.params["_prim"])
    if eqn.primitive is not jit_p:
        return True
    if inlines and eqn.params["inline"] in _EARLY:
        return False
    return not any(isinstance(c, core.Ref) for c in consts_of(eqn.params["jaxpr"]))


def _tracers(trace: Any, values: Sequence[Any], info: Any) -> list[Any]:
    """Return values as a trace's tracers, converted as ``bind`` does."""
    return [
        value
        if type(value) is pe.DynamicJaxprTracer and value._trace is trace
        else trace.to_jaxpr_tracer(_dtypes.canonicalize_value(value), info)
        for value in values
    ]


def append(trace: Any, eqn: Any, values: Sequence[Any], info: Any) -> Sequence[Any]:
    """Append an equation for which ``can_append`` holds, on values of equal types."""
    tracers = list(values)
    for value in tracers:
        if type(value) is not pe.DynamicJaxprTracer or value._trace is not trace:
            tracers = _tracers(trace, values, info)
            break
    if eqn.primitive in pe.const_fold_rules:
        avals = [var.aval for var in eqn.outvars]
        folded = pe.try_constant_folding(eqn.primitive, tracers, eqn.params, avals)
        if folded is not None:
            pairs = zip(folded, avals, strict=True)
            return [trace.new_const(const, info, aval) for const, aval in pairs]
    # As `emit_eqn`, `newvar` and `add_eqn` of JAX do, in a third of their calls: it is most of what
    # tracing a layer costs.
    frame = trace.frame
    variables = [core.Var(var.aval) for var in eqn.outvars]
    if not frame.is_high:
        params, is_shared = eqn.params, type(eqn.params) is SharedParams
        found = params.is_high if is_shared else None
        if found is None:  # of equal calls only the first asks
            avals = (tracer.aval for tracer in tracers)
            found = holds_jaxprs(eqn) and eqn.primitive.is_high(*avals, **params)
            if is_shared:
                params.is_high = found
        frame.is_high = found  # else nothing would expand a HiPrim in it
    made = pe.TracingEqn(tracers, variables, eqn.primitive, eqn.params, eqn.effects, info, eqn.ctx)
    frame.tracing_eqns.append(weakref.ref(made) if frame.auto_dce and not eqn.effects else made)
    return [pe.DynamicJaxprTracer(trace, var.aval, var, info, made) for var in variables]


_CALLS = (jit_p, custom_jvp_call_p)


def call_of(trace: Any, values: Sequence[Any], results: Sequence[Any], inlines: bool = True) -> Any:
    """Return the call that made some results from some values, for ``append``.

    It is the call of a jitted function, or of one with a custom forward derivative.

    Returns:
        An equation without variables of the trace, or None if not one call made the results.
    """
    made = [producer(x) if is_staged_in(x, trace) else (None, None) for x in results]
    eqn = made[0][1] if made else None
    if eqn is None or not (eqn.primitive in _CALLS or is_jvp_prim(eqn.params.get("_prim"))):
        return None
    if not can_append(eqn, inlines):
        return None
    if any(other is not eqn for _, other in made) or [var for var, _ in made] != eqn.outvars:
        return None
    # JAX may have added operands, such as constants, or forwarded some.
    given = [producer(x)[0] if is_staged_in(x, trace) else None for x in values]
    own = [producer(x)[0] for x in eqn.in_tracers]
    if len(given) != len(own) or any(x not in (None, y) for x, y in zip(given, own, strict=True)):
        return None
    return equation_like(eqn)


def equation_like(eqn: Any) -> Any:
    """Return an equation of a staging trace without the trace's variables, for ``append``."""
    variables = [core.Var(var.aval) for var in eqn.outvars]
    whole = eqn.primitive, SharedParams(eqn.params), eqn.effects, eqn.source_info, eqn.ctx
    return core.JaxprEqn([], variables, *whole)


def inline(trace: Any, eqn: Any, values: Sequence[Any], info: Any) -> Sequence[Any]:
    """Inline the body of a call for which ``is_inlined`` holds."""
    tracers = _tracers(trace, values, info)
    closed = eqn.params["jaxpr"]
    jaxpr, consts = open_of(closed), consts_of(closed)
    if consts or jaxpr.effects:
        results = pe.inline_jaxpr_into_trace(trace, info, jaxpr, consts, *tracers)
        return [trace.to_jaxpr_tracer(result, info) for result in results]
    return _inlined(trace, jaxpr, jaxpr.eqns, jaxpr.outvars, tracers, info)


def inline_but_last(trace: Any, eqn: Any, values: Sequence[Any], info: Any) -> Sequence[Any]:
    """Inline the body of such a call, without constants, but for its last equation.

    Returns:
        The operands of that equation.
    """
    jaxpr = open_of(eqn.params["jaxpr"])
    *eqns, last = jaxpr.eqns
    return _inlined(trace, jaxpr, eqns, last.invars, _tracers(trace, values, info), info)


def _inlined(
    trace: Any, jaxpr: Any, eqns: Sequence[Any], found: Sequence[Any], tracers: Any, info: Any
) -> Sequence[Any]:
    """Append some equations of a jaxpr without constants. Return the values of some atoms."""
    known = dict(zip(jaxpr.invars, tracers, strict=True))

    def values_of(atoms: Sequence[Any], info: Any) -> list[Any]:
        return [
            pe.DynamicJaxprTracer(trace, x.aval, x, info) if type(x) is core.Literal else known[x]
            for x in atoms
        ]

    for inner in eqns:
        stack, source = inner.source_info.name_stack, info
        if len(stack):
            source = info.replace(name_stack=info.name_stack + stack)
        results = append(trace, inner, values_of(inner.invars, source), source)
        known.update(zip(inner.outvars, results, strict=True))
    return values_of(found, info)
