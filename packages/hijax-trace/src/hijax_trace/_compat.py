"""The only place of hijax-trace that touches private JAX, or depends on its version.

Each name says for which versions it holds; all were checked on 0.10.2, 0.11.2 and 0.12.0.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
from collections.abc import Callable, Container, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import ad_util as _ad_util  # 0.10.2 - 0.12
from jax._src import api as _api  # 0.10.2 - 0.12
from jax._src import api_util as _api_util  # 0.10.2 - 0.12
from jax._src import array as _array  # 0.10.2 - 0.12
from jax._src import config as _config  # 0.10.2 - 0.12
from jax._src import core  # 0.10.2 - 0.12
from jax._src import custom_batching as _custom_batching  # 0.10.2 - 0.12
from jax._src import custom_derivatives as _custom_derivatives  # 0.10.2 - 0.12
from jax._src import hijax as _hijax  # 0.10.2 - 0.12, see below
from jax._src import linear_util as lu  # 0.10.2 - 0.12
from jax._src import mesh as _mesh  # 0.10.2 - 0.12
from jax._src import pjit as _pjit  # 0.10.2 - 0.12
from jax._src import shard_map as _shard_map  # 0.10.2 - 0.12
from jax._src import sharding_impls as _sharding_impls  # 0.10.2 - 0.12
from jax._src import source_info_util as _source_info  # 0.10.2 - 0.12
from jax._src.interpreters import ad, batching  # 0.10.2 - 0.12
from jax._src.interpreters import mlir as _mlir  # 0.10.2 - 0.12
from jax._src.interpreters import partial_eval as pe  # 0.10.2 - 0.12
from jax._src.lax.control_flow import conditionals as _conditionals  # 0.10.2 - 0.12
from jax._src.lax.control_flow import loops as _loops  # 0.10.2 - 0.12
from jax._src.state import discharge as _discharge  # 0.10.2 - 0.12
from jax._src.state import primitives as _state_primitives  # 0.10.2 - 0.12
from jax._src.state import types as _state  # 0.10.2 - 0.12
from jax.extend import core as _extend_core

try:
    from jax._src import flattree as _flat_tree  # pyrefly: ignore[missing-module-attribute]
except ImportError:  # 0.10.2; 0.11 - 0.12 have it
    _flat_tree: Any = None

# ---- Staging and re-emitting programs: what the interpreter needs ----

Jaxpr: type = core.Jaxpr
"""0.10.2 - 0.12."""
ClosedJaxpr: type = getattr(core, "ClosedJaxpr", core.Jaxpr)
JAXPRS: tuple[type, ...] = (core.Jaxpr,) if ClosedJaxpr is core.Jaxpr else (core.Jaxpr, ClosedJaxpr)
"""0.10.2 has open and closed ones; since 0.11 there is one class, which may hold constants."""
Literal: type = core.Literal
"""0.10.2 - 0.12."""
Ref: type = core.Ref
"""0.10.2 - 0.12."""
Tracer: type = core.Tracer
"""0.10.2 - 0.12."""

PjitFunction: type = type(jax.jit(lambda: None))
"""The C++ type of every jitted function, 0.10.2 - 0.12."""

jit_p = _pjit.jit_p
scan_p = _loops.scan_p
while_p = _loops.while_p
cond_p = _conditionals.cond_p
custom_jvp_call_p = _custom_derivatives.custom_jvp_call_p
custom_vjp_call_p = _custom_derivatives.custom_vjp_call_p
custom_vmap_p = _custom_batching.custom_vmap_p
shard_map_p = _shard_map.shard_map_p
"""The primitives whose bodies need more than an exchange of a parameter, 0.10.2 - 0.12."""


def open_of(jaxpr: Any) -> Any:
    """Returns the jaxpr without its constants' values (0.10.2), or itself."""
    return jaxpr.jaxpr if hasattr(jaxpr, "jaxpr") else jaxpr


def consts_of(jaxpr: Any) -> list[Any]:
    """Returns the values of a closed jaxpr's constants; none for an open one."""
    return list(getattr(jaxpr, "consts", ()))


def is_open(jaxpr: Any) -> bool:
    """Returns whether a jaxpr has no place for constants: those of remat and shard_map (0.10.2)."""
    return len(JAXPRS) > 1 and isinstance(jaxpr, core.Jaxpr)


def like_closed(jaxpr: Any) -> Any:
    """Returns a jaxpr without constants as a closed one (0.10.2)."""
    return jaxpr if (core.Jaxpr,) == JAXPRS else pe.close_jaxpr(jaxpr)


def with_consts(jaxpr: Any, consts: list[Any]) -> Any:
    """Returns the closed jaxpr of ``jaxpr``, as ``stage`` returned it, and its constants."""
    if (core.Jaxpr,) == JAXPRS:
        return jaxpr.with_consts(consts) if consts else jaxpr
    return core.ClosedJaxpr(jaxpr, consts)


def inputs_of(jaxpr: Any) -> list[Any]:
    """Returns the variables of a jaxpr's constants and arguments, in this order.

    Since 0.11 a constant without a value is an ordinary leading argument.
    """
    return jaxpr.all_invars if (core.Jaxpr,) == JAXPRS else [*jaxpr.constvars, *jaxpr.invars]


def used_inputs(jaxpr: Any) -> list[bool]:
    """Returns which arguments of an open jaxpr its results, or its effects, depend on."""
    return list(pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1])


def used_equations(jaxpr: Any) -> list[bool]:
    """Returns which equations of an open jaxpr its results, or its effects, depend on."""
    used = {var for var in jaxpr.outvars if type(var) is not Literal}
    found = []
    for eqn in reversed(jaxpr.eqns):
        found.append(bool(eqn.effects) or not used.isdisjoint(eqn.outvars))
        if found[-1]:
            used.update(atom for atom in eqn.invars if type(atom) is not Literal)
    return found[::-1]


def consts_as_args(jaxpr: Any) -> Any:
    """Returns the jaxpr with its constants as leading arguments (0.10.2 - 0.12)."""
    return pe.convert_constvars_jaxpr(jaxpr)


def stage(
    fn: Callable[..., Sequence[Any]], in_avals: Sequence[Any], debug_info: Any
) -> tuple[Any, list[Any]]:
    """Traces ``fn`` on flat arguments to a jaxpr, which may be high.

    Returns:
        The jaxpr, open, and the values of its constants: see ``inputs_of``.
    """
    if debug_info.arg_names is not None and len(debug_info.arg_names) != len(in_avals):
        debug_info = debug_info._replace(arg_names=None)
    wrapped = lu.wrap_init(fn, debug_info=debug_info)
    jaxpr, _, consts = pe.trace_to_jaxpr_dynamic(wrapped, in_avals)
    return jaxpr, list(consts)


def debug_info(traced_for: str, fn: Any, args: tuple, kwargs: dict) -> Any:
    """Returns what error messages and HLO call the function and its arguments."""
    return _api_util.debug_info(traced_for, fn, args, kwargs)


def named_info(name: str) -> Any:
    """Returns the same of what has a name alone: no signature is looked for (0.10.2 - 0.12)."""
    return core.DebugInfo(name, name, None, None)


def named_call(name: str, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Binds a call of a closed jaxpr under ``name``, as a jitted function makes it."""
    ins, outs = len(values), len(open_of(jaxpr).outvars)
    return jit_p.bind(
        *values,
        jaxpr=jaxpr,
        in_shardings=(UNSPECIFIED,) * ins,
        out_shardings=(UNSPECIFIED,) * outs,
        in_layouts=(None,) * ins,
        out_layouts=(None,) * outs,
        donated_invars=(False,) * ins,
        ctx_mesh=_mesh.get_concrete_mesh(),
        name=name,
        keep_unused=False,
        inline=_NOT_INLINE,
        compiler_options_kvs=(),
    )


if not hasattr(_hijax, "vmap_rule"):  # 0.10.2, 0.11.2
    _dce_jit = pe.dce_rules[jit_p]

    def _dce_named_call(used_outputs: list[bool], eqn: Any) -> tuple[list[bool], Any]:
        """Keeps a call whose name is more than a string, if all of it is used, as 0.12 does."""
        used_inputs, again = _dce_jit(used_outputs, eqn)
        is_whole = again is not None and all(used_inputs) and all(used_outputs)
        return used_inputs, eqn if is_whole and type(eqn.params["name"]) is not str else again

    pe.dce_rules[jit_p] = _dce_named_call

_EARLY: tuple[Any, ...] = (_api.Inline.JAX_EARLY,) if hasattr(_api, "Inline") else (True,)

UNSPECIFIED: Any = _sharding_impls.UNSPECIFIED
"""No sharding asked for, 0.10.2 - 0.12."""

_NOT_INLINE: Any = _api.Inline.AUTO if hasattr(_api, "Inline") else False  # 0.11: an enumeration


def wrap_fun(fn: Callable[..., Any], debug_info: Any) -> Any:
    """Returns ``fn`` as JAX's transformations want it (0.10.2 - 0.12)."""
    return lu.wrap_init(fn, debug_info=debug_info)


def current_trace() -> Any:
    """Returns the trace that operations are bound in now (0.10.2 - 0.12)."""
    return core.trace_ctx.trace


def is_staging(trace: Any) -> bool:
    """Returns whether a trace builds a jaxpr (0.10.2 - 0.12)."""
    return isinstance(trace, pe.DynamicJaxprTrace)


set_current_trace = core.set_current_trace
"""Context manager, 0.10.2 - 0.12."""


def trace_context() -> Hashable:
    """Returns all of JAX's configuration that a trace depends on (0.10.2 - 0.12)."""
    return _config.trace_context()


def is_jax_type(value: Any) -> bool:
    """Returns whether ``value`` can be an argument of a traced function as it is."""
    try:
        core.typeof(value)
    except TypeError:
        return False
    return True


def is_plain_array(value: Any) -> bool:
    """Returns whether ``value`` is an array or stands for one, and no Ref; False if in doubt."""
    if isinstance(value, pe.DynamicJaxprTracer):
        return type(value.aval) is core.ShapedArray
    return type(value) is _array.ArrayImpl


def is_ref(value: Any) -> bool:
    """Returns whether ``value`` is a Ref, or stands for one (0.10.2 - 0.12)."""
    if isinstance(value, core.Ref):
        return True
    return isinstance(value, core.Tracer) and isinstance(core.typeof(value), _state.AbstractRef)


typeof = core.typeof
"""0.10.2 - 0.12; public as ``jax.typeof``."""


def same_type(given: Any, expected: Any) -> bool:
    """Returns whether a value of one type may stand for one of the other.

    Weak types may differ (0.10.2 - 0.12).
    """
    return core.typematch(given, expected)


def scopes_of(stack: Any) -> list[str]:
    """Returns the names of a name stack's scopes, outermost first, without its transforms."""
    return [entry.name for entry in stack.stack if type(entry) is _source_info.Scope]


def name_scope(name: str) -> Any:
    """Returns a context manager: a name scope that is no part of the module path."""
    return _source_info.set_name_stack(_source_info.current_name_stack().extend(name))


def current_stack() -> Any:
    """Returns the name stack that is open now (0.10.2 - 0.12)."""
    return _source_info.current_name_stack()


def stack_without(stack: Any, names: Container[str]) -> Any:
    """Returns the name stack without some of its scopes."""
    kept = tuple(entry for entry in stack.stack if entry.name not in names)
    return _source_info.NameStack(kept)


def info_of(eqn: Any, outer: Any, stack: Any) -> Any:
    """Returns where an equation is said to come from when it is made again.

    Args:
        eqn: the equation.
        outer: the source of the call that it is inlined for, as JAX has it, or None.
        stack: its name stack.
    """
    info = eqn.source_info if outer is None else outer
    return info if info.name_stack is stack else info.replace(name_stack=stack)


def at(info: Any) -> Any:
    """Returns a context manager: operations are said to come from there (0.10.2 - 0.12)."""
    return _source_info.user_context(info.traceback, name_stack=info.name_stack)


def rebind(eqn: Any, values: Sequence[Any], info: Any) -> Sequence[Any]:
    """Binds an equation anew. Returns its results."""
    params = eqn.primitive.get_bind_params(eqn.params)
    with at(info), eqn.ctx.manager:
        try:
            result = eqn.primitive.bind(*values, **params)
        except _api_util.InternalFloatingPointError as error:  # jax_debug_nans
            name = eqn.params.get("name", eqn.primitive.name)
            raise FloatingPointError(f"invalid value ({error.ty}) encountered in {name}") from None
    return result if eqn.primitive.multiple_results else (result,)


def is_inlined(primitive: Any, params: dict[str, Any]) -> bool:
    """Returns whether JAX puts the body of a jitted function's call in its place at once."""
    return (
        primitive is jit_p
        and params["inline"] in _EARLY
        and all(sharding is UNSPECIFIED for sharding in params["in_shardings"])
        and all(sharding is UNSPECIFIED for sharding in params["out_shardings"])
        and not any(params["in_layouts"])
        and not any(params["out_layouts"])
    )


def can_append(eqn: Any) -> bool:
    """Returns whether an equation may be appended as it is to a jaxpr that is being built.

    Its types are known then, and no rule has to be run again.
    """
    if eqn.effects or eqn.primitive.ref_allocating:
        return False
    if eqn.primitive is not jit_p:
        return True
    consts = consts_of(eqn.params["jaxpr"])
    return eqn.params["inline"] not in _EARLY and not any(isinstance(c, core.Ref) for c in consts)


def append(trace: Any, eqn: Any, values: Sequence[Any], info: Any) -> Sequence[Any]:
    """Appends an equation for which ``can_append`` holds, on values of equal types."""
    to_tracer = trace.to_jaxpr_tracer
    tracers = [to_tracer(value, info) for value in values]
    avals = [var.aval for var in eqn.outvars]
    if eqn.primitive in pe.const_fold_rules:
        folded = pe.try_constant_folding(eqn.primitive, tracers, eqn.params, avals)
        if folded is not None:
            pairs = zip(folded, avals, strict=True)
            return [trace.new_const(const, info, aval) for const, aval in pairs]
    return trace.emit_eqn(tracers, avals, eqn.primitive, eqn.params, eqn.effects, info, eqn.ctx)


def inline(trace: Any, eqn: Any, values: Sequence[Any], info: Any) -> Sequence[Any]:
    """Puts the body of a call for which ``is_inlined`` holds in its place, as JAX does."""
    tracers = [trace.to_jaxpr_tracer(value, info) for value in values]
    jaxpr = eqn.params["jaxpr"]
    consts = consts_of(jaxpr)
    results = pe.inline_jaxpr_into_trace(trace, info, open_of(jaxpr), consts, *tracers)
    return [trace.to_jaxpr_tracer(result, info) for result in results]


def inner_value(tracer: Any) -> tuple[Any, int | None] | None:
    """Returns what a tracer of ``grad``, ``jvp`` or ``vmap`` stands for, and its mapped axis.

    None for any other value (0.10.2 - 0.12).
    """
    if isinstance(tracer, ad.JVPTracer | ad.LinearizeTracer):
        return tracer.primal, None
    if isinstance(tracer, batching.BatchTracer):
        return tracer.val, _axis(tracer)
    return None


def _axis(tracer: Any) -> Any:
    # JAX's rules compute some with NumPy, whose integers are no ints.
    axis = tracer.batch_dim
    return int(axis) if isinstance(axis, np.integer) else axis


def is_batched(value: Any) -> bool:
    """Returns whether a value is one of ``vmap`` (0.10.2 - 0.12)."""
    return isinstance(value, batching.BatchTracer)


def maps_above_staging(trace: Any) -> list[Any]:
    """Returns the traces of ``vmap``, innermost first, if ``trace`` is one of them and below them
    is one that builds a jaxpr; none otherwise (0.10.2 - 0.12)."""
    found = []
    while isinstance(trace, batching.BatchTrace):
        found.append(trace)
        trace = trace.parent_trace
    return found if is_staging(trace) else []


def unmapped(value: Any, trace: Any) -> tuple[Any, Any]:
    """Returns what ``value`` stands for in the trace of a ``vmap``, and its mapped axis."""
    if isinstance(value, batching.BatchTracer) and value._trace.tag is trace.tag:
        return value.val, _axis(value)
    return value, None


def axis_of(trace: Any) -> Any:
    """Returns the name and size of the axis of a ``vmap`` (0.10.2 - 0.12)."""
    return trace.axis_data


def mapped(
    fn: Callable[..., Any], axis: Any, in_axes: Any, out_axes: Any, sum_match: bool = False
) -> Callable[..., Any]:
    """Returns ``vmap`` of a function along an axis that is given by ``axis_of``."""
    return _api.vmap(
        fn,
        in_axes=in_axes,
        out_axes=out_axes,
        axis_size=axis.size,
        axis_name=axis.name,
        spmd_axis_name=axis.spmd_name or axis.explicit_mesh_axis,
        sum_match=sum_match,
    )


def is_staged(value: Any) -> bool:
    """Returns whether ``value`` is one of the values of any staging trace (0.10.2 - 0.12)."""
    return isinstance(value, pe.DynamicJaxprTracer)


def producer(tracer: Any) -> tuple[Any, Any]:
    """Returns a staged value's variable and the equation that made it, or None for that.

    0.10.2 - 0.12. The equation has ``in_tracers`` and ``outvars``.
    """
    return tracer.val, tracer.parent


def constants_of(trace: Any) -> Mapping[Any, Any]:
    """Returns the constants of a staging trace so far, by variable (0.10.2 - 0.12)."""
    return trace.frame.constvar_to_val


def primitive_names() -> list[str]:
    """Returns the names of all primitives that JAX and what is loaded beside it have a rule for."""
    tables = [_mlir._lowerings, *_mlir._platform_specific_lowerings.values()]
    lowered = {primitive.name for table in tables for primitive in table}
    return sorted(lowered | {_hijax.call_hi_primitive_p.name})


def is_high_type(aval: Any) -> bool:
    """Returns whether a type is a high-level one (0.10.2 - 0.12)."""
    return bool(aval.is_high)


def is_staged_in(value: Any, trace: Any) -> bool:
    """Returns whether ``value`` is one of the values of a staging trace (0.10.2 - 0.12)."""
    return isinstance(value, pe.DynamicJaxprTracer) and value._trace is trace


def staged_in(trace: Any) -> list[Any]:
    """Returns the equations of a staging trace so far that are still needed (0.10.2 - 0.12)."""
    eqns = (eqn() if isinstance(eqn, weakref.ref) else eqn for eqn in trace.frame.tracing_eqns)
    return [eqn for eqn in eqns if eqn is not None]


def staging_trace(trace: Any) -> Any:
    """Returns the trace that builds a jaxpr below ``trace``, or None (0.10.2 - 0.12)."""
    while trace is not None and not is_staging(trace):
        trace = getattr(trace, "parent_trace", None)
    return trace


def operand_count(eqn: Any) -> int:
    """Returns how many operands an equation has, staged or being staged (0.10.2 - 0.12)."""
    return len(eqn.in_tracers if isinstance(eqn, pe.TracingEqn) else eqn.invars)


def forgettable(jaxpr: Any) -> dict[Any, list[Any]]:
    """Returns the variables that nothing needs any more after each equation, by that."""
    after: dict[Any, list[Any]] = {}
    for var, eqn in core.last_used(jaxpr).items():
        if eqn is not None:
            after.setdefault(eqn, []).append(var)
    for eqn in jaxpr.eqns:
        after.setdefault(eqn, []).extend(v for v in eqn.outvars if isinstance(v, core.DropVar))
    return after


_HOLDING: dict[Any, bool] = {}


def holds_jaxprs(eqn: Any) -> bool:
    """Returns whether an equation's primitive has jaxprs among its parameters.

    It is looked at once for each primitive, of which some thousand equations may come along.
    """
    held = _HOLDING.get(eqn.primitive)
    if held is None:
        parts = [
            part
            for value in eqn.params.values()
            for part in (value if isinstance(value, tuple) else (value,))
        ]
        held = _HOLDING[eqn.primitive] = any(isinstance(part, JAXPRS) for part in parts)
    return held


def has_effects(params: dict[str, Any]) -> bool:
    """Returns whether a jaxpr among an equation's parameters has effects."""
    return any(
        open_of(jaxpr).effects
        for value in params.values()
        for jaxpr in (value if isinstance(value, tuple) else (value,))
        if isinstance(jaxpr, JAXPRS)
    )


def with_shared(jaxpr: Any, avals: Sequence[Any], places: Sequence[int]) -> Any:
    """Returns a jaxpr whose first inputs are those of several jaxprs.

    0.10.2 - 0.12.

    Args:
        jaxpr: the jaxpr.
        avals: the types of all first inputs.
        places: which of them its own first inputs are.
    """
    opened = open_of(jaxpr)
    first = list(map(core.gensym(), avals))
    for place, var in zip(places, opened.invars, strict=False):
        first[place] = var
    invars = [*first, *opened.invars[len(places) :]]
    info = opened.debug_info._replace(arg_names=None)
    wide = opened.replace(invars=invars, debug_info=info)
    return wide if is_open(jaxpr) else with_consts(wide, consts_of(jaxpr))


def with_rule(rule: Any, wrap: Callable[..., Any]) -> Any:
    """Returns the vmap rule of a ``custom_vmap_call``, wrapped (0.10.2 - 0.12)."""
    again = copy.copy(rule)
    again.rule = wrap(rule.rule)
    return again


def label(jaxpr: Any) -> str:
    """Returns what a body was traced for, as ``scan(body)``."""
    return _label(open_of(jaxpr).debug_info)


def _label(info: Any) -> str:
    if info is None:
        return "trace"
    return f"{info.traced_for.split(' ')[0]}({info.func_name})".replace("/", ".")


_LOOPS = ("scan", "while", "fori_loop", "map", "cond", "switch")


def loop_label(trace: Any, base: Any) -> str:
    """Returns the label of the innermost loop or branch that is staged between two traces."""
    while trace is not None and trace is not base:
        if is_staging(trace) and trace.frame.debug_info is not None:
            info = trace.frame.debug_info
            if info.traced_for.startswith(_LOOPS):
                return _label(info)
        trace = getattr(trace, "parent_trace", None)
    return ""


def in_shard_map(params: dict[str, Any]) -> contextlib.ExitStack:
    """Returns a context manager: what is traced in it is the body of that shard_map."""
    mesh, manual = params["mesh"], params["newly_manual_axes"]
    context = contextlib.ExitStack()
    context.enter_context(_shard_map._extend_axis_env(mesh, manual))
    context.enter_context(_mesh.use_abstract_mesh(_shard_map._as_manual_mesh(mesh, manual)))
    context.enter_context(_config._check_vma(params["check_vma"]))
    return context


def more_scan_consts(params: dict[str, Any], extra: int) -> dict[str, Any]:
    """Returns the parameters of a scan that takes ``extra`` more leading constants."""
    if "num_consts" in params:  # 0.10.2
        return {**params, "num_consts": params["num_consts"] + extra}
    consts, carry, xs = params["ft_in"].unpack()
    consts = _flat_tree.nones(len(consts) + extra)
    return {**params, "ft_in": _flat_tree.pack((consts, carry, xs))}


def more_scan_steps(params: dict[str, Any], extra: int) -> dict[str, Any]:
    """Returns the parameters of a scan that steps along ``extra`` more operands, its last."""
    if "ft_in" not in params:  # 0.10.2 counts the others alone
        return params
    consts, carry, xs = params["ft_in"].unpack()
    xs = _flat_tree.nones(len(xs) + extra)
    return {**params, "ft_in": _flat_tree.pack((consts, carry, xs))}


def step_type(aval: Any, axis: int = 0) -> Any:
    """Returns the type of one step along an axis."""
    return core.mapped_aval(aval.shape[axis], axis, aval)


def scan_parts(params: dict[str, Any]) -> tuple[int, int]:
    """Returns how many constants and how much carry a scan has."""
    if "num_consts" in params:  # 0.10.2
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


# ---- High-level types: what hi/ needs ----

HiTypeBase: type = _hijax.HiType
"""0.10.2 - 0.12; its messages for missing methods are bare asserts on 0.10.2."""

if not hasattr(_hijax, "HiPrim"):  # 0.10.2
    # vmap of jit reads it to fit shardings, of which hi types have none (jax issue 38125).
    HiTypeBase = type("HiType", (HiTypeBase,), {"ndim": 0, "__module__": __name__})

MappingSpec: type = _hijax.MappingSpec
"""How a high-level type is mapped by ``vmap`` or ``scan``, 0.10.2 - 0.12."""

HiPspecBase: type = _hijax.HiPspec
"""How a high-level type is split by ``shard_map``, 0.10.2 - 0.12."""

Zero: type = _ad_util.Zero
"""A tangent that is known to be zero, with its type as ``aval``, 0.10.2 - 0.12."""

register_hitype_base: Callable = _hijax.register_hitype
"""0.10.2 - 0.12."""


def instantiate(tangent: Any) -> Any:
    """Returns a tangent with a symbolic zero replaced by an array or hi value of zeros."""
    return _ad_util.instantiate(tangent)


def zeros_like_aval(aval: Any) -> Any:
    """Returns the zero of a type: ``vspace_zero()`` of a hi type."""
    return ad.zeros_like_aval(aval)


def lower_jaxpr(jaxpr: Any) -> Any:
    """Returns the lojax jaxpr of a jaxpr with hi types and primitives (0.10.2 - 0.12)."""
    return pe.lower_jaxpr2(jaxpr)


def as_closed(jaxpr: Any) -> Any:
    """Returns a jaxpr as what ``lower_jaxpr`` takes: closed, on 0.10.2."""
    if isinstance(jaxpr, ClosedJaxpr):
        return jaxpr
    return pe.close_jaxpr(jaxpr)


class PrimitiveBase(_extend_core.Primitive):
    """A ``Primitive`` whose rules are its methods, in JAX's tables (0.10.2 - 0.12)."""

    def __init__(self, name: str):
        super().__init__(name)
        ad.primitive_jvps[self] = self._rule("jvp")
        ad.primitive_transposes[self] = self._rule("transpose")
        batching.fancy_primitive_batchers[self] = self._rule("batch")
        # Reached where `is_high` says no: then the primitive is lowered with the rest.
        lowering = _mlir.lower_fun(self._rule("to_lojax"), multiple_results=self.multiple_results)
        _mlir.register_lowering(self, lowering)

    def _rule(self, name: str) -> Callable:
        """Returns the method of that name, looked up when it is called."""
        return lambda *args, **kwargs: getattr(self, name)(*args, **kwargs)


def _live_ins_optional(dce: Callable) -> Callable:
    """Lets ``dce(used_outs, live_ins)`` be called without ``live_ins``: all are live."""

    @functools.wraps(dce)
    def called(self: Any, used_outs: Any, live_ins: Any = None) -> Any:
        if live_ins is None:
            live_ins = jax.tree.unflatten(self.in_tree, [True] * self.in_tree.num_leaves)
        return dce(self, used_outs, live_ins)

    return called


def _residuals_closed_over(remat: Callable) -> Callable:
    """Turns what ``remat`` returns on 0.12 (out, residuals, rem) into (out, rem)."""

    @functools.wraps(remat)
    def called(self: Any, trace: Any, *args: Any) -> Any:
        out, residuals, rem = remat(self, trace, *args)
        return out, lambda *again: rem(residuals, *again)

    return called


if hasattr(_hijax, "vmap_rule"):  # 0.12
    HiPrimBase: type = vars(_hijax)["HiPrim"]
    vmap_rule: Callable = vars(_hijax)["vmap_rule"]
    unmap_avals: Callable = vars(_hijax)["unmap_avals"]
    bdims_at_front: Callable = vars(_hijax)["bdims_at_front"]
else:  # 0.10.2, 0.11.2
    _OlderBase: type = getattr(_hijax, "HiPrim", None) or _hijax.VJPHiPrimitive

    class HiPrimBase(_OlderBase):  # type: ignore[no-redef]
        """``HiPrim`` with the interface of 0.12 on the class that older versions call."""

        def __init_subclass__(cls, **kwargs: Any) -> None:
            super().__init_subclass__(**kwargs)
            if "dce" in vars(cls):
                cls.dce = _live_ins_optional(vars(cls)["dce"])
            if "remat" in vars(cls):
                cls.remat = _residuals_closed_over(vars(cls)["remat"])

        def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
            raise NotImplementedError(
                f"for vmap support, subclass {type(self)} must implement `batch`"
            )

        def dce(self, used_outs: Any, live_ins: Any = None) -> Any:
            if self.effects or any(jax.tree.leaves(used_outs)):
                return True, True, self
            return False, False, None

        def pp_params(self) -> dict[str, Any]:
            return {k: v for k, v in self.params.items() if not k.startswith("_")}

        def __repr__(self) -> str:
            shown = " ".join(f"{k}={v}" for k, v in self.pp_params().items())
            return f"{type(self).__name__}[{shown}]"

    def unmap_avals(axis_data: Any, avals: Any, dims: Any) -> Any:
        """Returns the types of the whole batch for the types of one example."""
        return jax.tree.map(
            lambda aval, dim: core.unmapped_aval(
                axis_data.size, dim, aval, axis_data.explicit_mesh_axis
            ),
            avals,
            dims,
        )

    def bdims_at_front(axis_data: Any, args: Any, dims: Any) -> Any:
        """Returns the arguments with the batch axis first, broadcast where they have none."""
        return jax.tree.map(
            lambda x, dim: batching.bdim_at_front(
                x, dim, axis_data.size, axis_data.explicit_mesh_axis
            ),
            args,
            dims,
        )

    def vmap_rule(
        axis_data: Any, f: Callable, in_axes: Any, out_axes: Any, *, sum_match: bool = False
    ) -> Callable:
        """Returns ``f`` mapped over ``axis_data``, symbolic zeros included."""
        over_arrays = mapped(f, axis_data, in_axes, out_axes, sum_match)
        is_none = lambda x: x is None  # noqa: E731
        zeros_in = functools.partial(_hijax.map_zero, axis_data)
        zeros_out = functools.partial(_hijax.unmap_zero, axis_data)

        def batched(*args: Any) -> Any:
            out = over_arrays(*jax.tree.map(zeros_in, in_axes, args, is_leaf=is_none))
            return jax.tree.map(zeros_out, out_axes, out, is_leaf=is_none)

        return batched


if "to_lojax" not in vars(core.closed_call_p):  # 0.10.2
    # 0.10.2 has no rule for what remat of a scan becomes. Nothing that worked is changed.
    def _closed_call_to_lojax(*args: Any, call_jaxpr: Any) -> Any:
        return core.jaxpr_as_fun(call_jaxpr)(*args)

    core.closed_call_p.to_lojax = _closed_call_to_lojax


_swap_mapped = batching.fancy_primitive_batchers[_state_primitives.swap_p]


def _swap_vmap(axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Writes to a reference, under ``vmap``.

    JAX refuses where the reference isn't mapped, also if nothing is that is written: then it is
    written once. Nothing that worked is changed (0.10.2 - 0.12).
    """
    if any(dim is not None for dim in dims):
        return _swap_mapped(axis_data, args, dims, **params)
    return _state_primitives.swap_p.bind(*args, **params), None


batching.fancy_primitive_batchers[_state_primitives.swap_p] = _swap_vmap


def native_rule(name: str) -> Any | None:
    """Returns JAX's own ``vjp_from_jvp`` and the like, which 0.10.2 lacks."""
    return getattr(_hijax, name, None)


# What box/ needs: where a program is being traced. All 0.10.2 - 0.12.


def is_eval(trace: Any) -> bool:
    """Returns whether a trace is none: operations are computed at once."""
    return trace is None or isinstance(trace, core.EvalTrace)


def parent_trace(trace: Any) -> Any:
    """Returns the trace around one of grad, vmap or the like."""
    return getattr(trace, "parent_trace", None)


def traced_for(trace: Any) -> str:
    """Returns what a trace is for: "jit", "scan", "while_body", "vmap", "grad" ..."""
    if is_staging(trace):
        info = trace.frame.debug_info
        return "a trace" if info is None else info.traced_for
    kinds = {"BatchTrace": "vmap", "JVPTrace": "jvp", "LinearizeTrace": "grad"}
    kinds |= {"ShardMapTrace": "shard_map", "RematTrace": "remat"}
    return kinds.get(type(trace).__name__, type(trace).__name__)


def trace_of(value: Any) -> Any:
    """Returns the trace that a value is a tracer of, or None."""
    return value._trace if isinstance(value, core.Tracer) else None


undifferentiated_refs: bool = hasattr(_hijax, "HiPrim")
"""Whether a loop can be transposed that writes only constants to a reference made before it.

0.10.2 fails with "DynamicJaxprTracer has no attribute accum".
"""


def register_discharge_to_first(primitive: Any) -> None:
    """Lets a primitive of a value and a reference become the value, where references end.

    JAX's rules get the operands last, after two other arguments on 0.10.2 and one since.
    """

    @_discharge.register_discharge_rule(primitive)
    def discharged(*args: Any, **params: Any) -> Any:
        value, _ = args[-2:]
        return (None, None), value
