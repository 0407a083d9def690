"""Traces: where a program is traced, and what tracers stand for."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
from jax._src import api as _api  # 0.10.2 - 0.12
from jax._src import api_util as _api_util  # 0.10.2 - 0.12
from jax._src import array as _array  # 0.10.2 - 0.12
from jax._src import config as _config  # 0.10.2 - 0.12
from jax._src import core  # 0.10.2 - 0.12
from jax._src import linear_util as lu  # 0.10.2 - 0.12
from jax._src import source_info_util as _source_info  # 0.10.2 - 0.12
from jax._src.interpreters import (
    ad,  # 0.10.2 - 0.12
    batching,  # 0.10.2 - 0.12
)
from jax._src.interpreters import partial_eval as pe  # 0.10.2 - 0.12

from .jaxpr import _label

Tracer: type = core.Tracer


def stage(
    fn: Callable[..., Sequence[Any]], in_avals: Sequence[Any], debug_info: Any
) -> tuple[Any, list[Any]]:
    """Trace a function of flat arguments to a jaxpr.

    Returns:
        The jaxpr, open, and the values of its constants: see ``inputs_of``.
    """
    if debug_info.arg_names is not None and len(debug_info.arg_names) != len(in_avals):
        debug_info = debug_info._replace(arg_names=None)
    wrapped = lu.wrap_init(fn, debug_info=debug_info)
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrapped, in_avals)
    return jaxpr, list(consts)


debug_info: Callable[[str, Any, tuple, dict[str, Any]], Any] = _api_util.debug_info
"""Returns the names of a function and its arguments. The first says what it is traced for."""


def more_inputs(trace: Any, avals: Iterable[Any]) -> list[Any]:
    """Return new inputs of a jaxpr that is being staged, after those that it has."""
    info = _source_info.new_source_info()
    return [trace.new_arg(aval, info) for aval in avals]


def current_trace() -> Any:
    """Return the trace that operations are bound in."""
    return core.trace_ctx.trace


def is_staging(trace: Any) -> bool:
    """Return whether a trace builds a jaxpr."""
    return isinstance(trace, pe.DynamicJaxprTrace)


def traces_around(trace: Any) -> list[Any]:
    """Return the traces in which a trace was begun, outermost last."""
    found = []
    while (trace := parent_trace(trace)) is not None:
        found.append(trace)
    return found


set_current_trace = core.set_current_trace
"""Context manager."""


trace_context: Callable[[], Hashable] = _config.trace_context
"""Returns the part of JAX's configuration that traces depend on."""


def checks_leaks() -> bool:
    """Return whether JAX looks for traces that outlive their programs."""
    return _config.check_tracer_leaks.value


def is_jax_type(value: Any) -> bool:
    """Return whether a value can be an argument of traced functions."""
    try:
        core.typeof(value)
    except (TypeError, ValueError):
        # ValueError: an object with `__jax_array__`, which functions of JAX take and traces do not.
        return False
    return True


def is_plain_array(value: Any) -> bool:
    """Return whether a value is surely an array, concrete or traced."""
    if isinstance(value, pe.DynamicJaxprTracer):
        return type(value.aval) is core.ShapedArray
    return type(value) is _array.ArrayImpl


def inner_value(tracer: Any) -> tuple[Any, int | None] | None:
    """Return a tracer's inner value and its mapped axis.

    None for any other value.
    """
    if isinstance(tracer, ad.JVPTracer | ad.LinearizeTracer):
        return tracer.primal, None
    if isinstance(tracer, batching.BatchTracer):
        return tracer.val, _axis(tracer)
    return None


def _axis(tracer: Any) -> Any:
    # JAX's rules compute some axes with NumPy, whose integers are not ints.
    axis = tracer.batch_dim
    return int(axis) if isinstance(axis, np.integer) else axis


def is_batched(value: Any) -> bool:
    """Return whether a value is a tracer of ``vmap``."""
    return isinstance(value, batching.BatchTracer)


def mapped(
    fn: Callable[..., Any], axis: Any, in_axes: Any, out_axes: Any, sum_match: bool = False
) -> Callable[..., Any]:
    """Return ``vmap`` of a function along an axis, as JAX has it."""
    return _api.vmap(
        fn,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_size=axis.size,
        axis_name=axis.name,
        spmd_axis_name=axis.spmd_name or axis.explicit_mesh_axis,
        sum_match=sum_match,
    )


def is_staged_array(value: Any) -> bool:
    """Return whether a value is a tracer of any staging trace, for an array."""
    return type(value) is pe.DynamicJaxprTracer and type(value.aval) is core.ShapedArray


def is_staged(value: Any) -> bool:
    """Return whether a value is a tracer of any staging trace."""
    return isinstance(value, pe.DynamicJaxprTracer)


def producer(tracer: Any) -> tuple[Any, Any]:
    """Return a staged value's variable, and its equation or None.

    The equation has ``in_tracers`` and ``outvars``.
    """
    return tracer.val, tracer.parent


def constants_of(trace: Any) -> Mapping[Any, Any]:
    """Return the constants of a staging trace so far, by variable."""
    return trace.frame.constvar_to_val


def is_staged_in(value: Any, trace: Any) -> bool:
    """Return whether a value is a tracer of a staging trace."""
    return isinstance(value, pe.DynamicJaxprTracer) and value._trace is trace


def staged_in(trace: Any, first: int = 0) -> list[Any]:
    """Return the equations of a staging trace so far, from one of ``staged_count`` on."""
    eqns = trace.frame.tracing_eqns[first:]
    eqns = (eqn() if isinstance(eqn, weakref.ref) else eqn for eqn in eqns)
    return [eqn for eqn in eqns if eqn is not None]


def release(trace: Any, eqn: Any) -> None:
    """Let an equation go from a staging trace when nothing refers to its results any more.

    JAX does that with all equations where it removes dead code while it traces.
    """
    eqns = trace.frame.tracing_eqns
    for place in range(len(eqns) - 1, -1, -1):  # it is one of the last
        if eqns[place] is eqn:
            eqns[place] = weakref.ref(eqn)
            return


def staging_trace(trace: Any) -> Any:
    """Return the staging trace at or below a trace, or None."""
    while trace is not None and not is_staging(trace):
        trace = getattr(trace, "parent_trace", None)
    return trace


def staged_count(trace: Any) -> int:
    """Return how many equations a staging trace has had so far."""
    return len(trace.frame.tracing_eqns)


def is_used_besides(value: Any, users: Sequence[Any]) -> bool:
    """Return whether more equations than some use a staged value, or the results of those."""
    eqns = value._trace.frame.tracing_eqns
    last = eqns[-1] if eqns else None
    if (last() if isinstance(last, weakref.ref) else last) is value.parent:
        return False  # as where it is used at once
    variables = {id(var) for user in users for var in user.outvars} | {id(value.val)}
    known = set(map(id, users))
    for eqn in reversed(eqns):
        eqn = eqn() if isinstance(eqn, weakref.ref) else eqn
        if eqn is value.parent:
            break
        if eqn is None or id(eqn) in known:
            continue
        if not variables.isdisjoint([id(x.val) for x in eqn.in_tracers]):
            return True
    return False


_LOOPS = ("scan", "while", "fori_loop", "map", "cond", "switch")


def loop_label(trace: Any, base: Any) -> str:
    """Return the label of the innermost loop between two traces."""
    while trace is not None and trace is not base:
        if is_staging(trace) and trace.frame.debug_info is not None:
            info = trace.frame.debug_info
            if info.traced_for.startswith(_LOOPS):
                return _label(info)
        trace = getattr(trace, "parent_trace", None)
    return ""


eval_trace: Any = core.eval_trace


def is_eval(trace: Any) -> bool:
    """Return whether operations of a trace are computed at once."""
    return trace is None or isinstance(trace, core.EvalTrace)


def parent_trace(trace: Any) -> Any:
    """Return the trace in which a trace was begun, or None."""
    return getattr(trace, "parent_trace", None)


def traced_for(trace: Any) -> str:
    """Return what a trace is for, such as "jit" or "vmap"."""
    if is_staging(trace):
        info = trace.frame.debug_info
        return "a trace" if info is None else info.traced_for
    kinds = {"BatchTrace": "vmap", "JVPTrace": "jvp", "LinearizeTrace": "grad"}
    kinds |= {"ShardMapTrace": "shard_map", "RematTrace": "remat"}
    return kinds.get(type(trace).__name__, type(trace).__name__)


def trace_of(value: Any) -> Any:
    """Return the trace that a value is a tracer of, or None."""
    return value._trace if isinstance(value, core.Tracer) else None
