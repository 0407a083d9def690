"""References: JAX's mutable arrays, of which Boxes are made.

JAX has no rule, or a stricter one, for some of what programs do with Boxes in branches, loops and
under ``vmap``. The rules here take their place in JAX's tables, for the whole process. For programs
without references each calls the rule of JAX that it replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
from jax._src import (
    ad_util,  # 0.10.2 - 0.12
    core,  # 0.10.2 - 0.12
)
from jax._src.custom_derivatives import custom_jvp_call_p  # 0.10.2 - 0.12
from jax._src.interpreters import (
    ad,  # 0.10.2 - 0.12
    batching,  # 0.10.2 - 0.12
    partial_eval,  # 0.10.2 - 0.12
)
from jax._src.lax import lax as _lax  # 0.10.2 - 0.12
from jax._src.lax.control_flow.conditionals import cond_p  # 0.10.2 - 0.12
from jax._src.lax.control_flow.loops import while_p  # 0.10.2 - 0.12
from jax._src.state import discharge as _discharge  # 0.10.2 - 0.12
from jax._src.state import primitives as _state_primitives  # 0.10.2 - 0.12
from jax._src.state import types as _state  # 0.10.2 - 0.12

from .jaxpr import with_consts
from .pjit import named_info
from .trace import stage


def is_ref(value: Any) -> bool:
    """Return whether a value is a Ref or a tracer of one."""
    if isinstance(value, core.Ref):
        return True
    return isinstance(value, core.Tracer) and isinstance(core.typeof(value), _state.AbstractRef)


_swap_mapped = batching.fancy_primitive_batchers[_state_primitives.swap_p]


def _swap_vmap(axis_data: Any, args: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
    """Write to a reference, under ``vmap``.

    JAX refuses a write to a reference that isn't mapped, even of a value that isn't mapped. This
    rule writes such a value once. It changes nothing that worked.
    """
    if any(dim is not None for dim in dims):
        return _swap_mapped(axis_data, args, dims, **params)
    return _state_primitives.swap_p.bind(*args, **params), None


batching.fancy_primitive_batchers[_state_primitives.swap_p] = _swap_vmap


_CONSTANT = "no_grad_no_remat"


def new_ref(value: Any, constant: bool) -> Any:
    """Return a new reference to a value.

    JAX can't transpose loops and remats that write constants to a reference which is
    differentiated: 0.10.2 fails with "ValAccum has no ref" and "DynamicJaxprTracer has no accum",
    all versions with "Cannot lower jaxpr with effects".

    Args:
        constant: whether programs that make it do not differentiate it. Such a reference is
            written once where ``jax.checkpoint`` computes the value twice.
    """
    # Since 0.11 references have no weak types.
    value = with_weak_type(value, False)
    return jax.new_ref(value, kind=_CONSTANT if constant else None)


def with_weak_type(value: Any, weak: bool) -> Any:
    """Return a value with the type of a Python number, or with another one."""
    aval = core.typeof(value)
    if getattr(aval, "weak_type", weak) == weak:
        return value
    return _lax._convert_element_type(value, aval.dtype, weak_type=weak)


def is_constant_ref(ref: Any) -> bool:
    """Return whether a reference is one that is not differentiated."""
    return core.typeof(ref).kind == _CONSTANT


_jvp, _linearize = ad.primitive_jvps[core.ref_p], ad.primitive_linearizations[core.ref_p]


def _ref_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> Any:
    """Make a reference, without a tangent if it is constant.

    JAX gives it one in forward mode. Then what is written to it no longer counts as constant.
    """
    if params["kind"] != _CONSTANT:
        return _jvp(primals, tangents, **params)
    ref = core.ref_p.bind(*primals, **params)
    return ref, ad_util.Zero(core.typeof(ref).to_tangent_aval())


def _ref_linearize(is_vjp: bool, nonzeros: Sequence[bool], value: Any, **params: Any) -> Any:
    if params["kind"] != _CONSTANT:
        return _linearize(is_vjp, nonzeros, value, **params)
    return ad.fallback_linearize_rule(core.ref_p, is_vjp, nonzeros, value, **params)


ad.primitive_jvps[core.ref_p] = _ref_jvp
ad.primitive_linearizations[core.ref_p] = _ref_linearize


def register_discharge_to_first(primitive: Any) -> None:
    """Discharge a primitive of a value and a reference to the value.

    JAX passes a rule the operands last, after two other arguments on 0.10.2 and one since.
    """

    @_discharge.register_discharge_rule(primitive)
    def discharged(*args: Any, **params: Any) -> Any:
        value, _ = args[-2:]
        return (None, None), value


@_discharge.register_discharge_rule(custom_jvp_call_p)
def _custom_jvp_call_discharged(*args: Any, call_jaxpr: Any, **params: Any) -> Any:
    """Discharge a ``custom_jvp`` whose function uses references.

    JAX has such a rule for ``custom_vjp`` alone. Derivatives have been taken by then, so that the
    function is all that is needed.
    """
    del params
    types = call_jaxpr.in_avals
    operands = args[len(args) - len(types) :]  # after what differs between versions of JAX
    found = core.jaxpr_as_fun(_discharge.discharge_state(call_jaxpr))(*operands)
    count = len(call_jaxpr.out_avals)
    after = iter(found[count:])
    changed = [next(after) if isinstance(one, _state.AbstractRef) else None for one in types]
    return changed, found[:count]


_cond_evaluated = partial_eval.custom_partial_eval_rules[cond_p]
_cond_mapped = batching.fancy_primitive_batchers[cond_p]


class _Branches(NamedTuple):
    """Branches whose references are operands and results instead.

    Attributes:
        places: the numbers of the operands of the ``cond`` that are references.
        branches: closed; they take what each reference holds, and return what they leave in it
            after their own results.
        written: which of the references any branch writes to.
        count: how many results the branches had before.
    """

    places: Sequence[int]
    branches: tuple[Any, ...]
    written: Sequence[bool]
    count: int

    @classmethod
    def of(cls, avals: Sequence[Any], branches: tuple[Any, ...]) -> _Branches:
        """Return them for operands of these types, the index among them."""
        places = [i for i, aval in enumerate(avals) if isinstance(aval, _state.AbstractRef)]
        if not places:
            return cls((), branches, (), 0)
        made, count = tuple(map(_discharge.discharge_state, branches)), len(branches[0].out_avals)
        written = [
            any(one.jaxpr.outvars[count + k] is not one.jaxpr.invars[i - 1] for one in made)
            for k, i in enumerate(places)
        ]
        return cls(places, made, written, count)

    def read(self, refs: Sequence[Any]) -> list[Any]:
        """Return what the references hold, in the current trace."""
        return [_state_primitives.ref_get(ref, ()) for ref in refs]

    def write(self, refs: Sequence[Any], values: Sequence[Any]) -> None:
        """Give the references what the branch that ran has left in them."""
        for ref, value, is_written in zip(refs, values, self.written, strict=True):
            if is_written:
                _state_primitives.ref_set(ref, (), value)


def _cond_partly(trace: Any, *tracers: Any, branches: tuple[Any, ...], **params: Any) -> Any:
    """Evaluate a ``cond`` partially whose branches use references.

    JAX refuses it, and does it where a loop around is differentiated. Known references are read
    before the known part of the ``cond`` runs, and written after it. If one is unknown, all of the
    ``cond`` is left for later: so JAX keeps it in the loop when it hoists invariants out.
    """
    made = _Branches.of([tracer.aval for tracer in tracers], branches)
    if not made.places:
        return _cond_evaluated(trace, *tracers, branches=branches, **params)
    if not all(tracers[i].pval.is_known() for i in (0, *made.places)):
        given = {"branches": branches, **params}
        return trace.default_process_primitive(cond_p, tracers, given)
    refs, given = [tracers[i].pval.get_known() for i in made.places], list(tracers)
    with core.set_current_trace(trace.parent_trace):
        for i, value in zip(made.places, made.read(refs), strict=True):
            given[i] = trace.new_const(value)
    results = _cond_evaluated(trace, *given, branches=made.branches, **params)
    # JAX gives what is known of them as values, and the others as tracers of the trace.
    after = results[made.count :]
    for value, is_written in zip(after, made.written, strict=True):
        if is_written and isinstance(value, partial_eval.JaxprTracer) and value._trace is trace:
            raise NotImplementedError(
                "A value that a branch writes to a Box from outside of grad must not be "
                "differentiated, got one that is. Write box.set(jax.lax.stop_gradient(value))."
            )
    with core.set_current_trace(trace.parent_trace):
        made.write(refs, after)
    return results[: made.count]


partial_eval.custom_partial_eval_rules[cond_p] = _cond_partly


_while_evaluated = partial_eval.custom_partial_eval_rules[while_p]


def _while_partly(trace: Any, *tracers: Any, **params: Any) -> Any:
    """Evaluate a ``while`` partially whose body uses references, as of ranges that it measures.

    JAX computes what is known, and leaves a second loop for what is not, which computes all again.
    With references that one could not be dropped where nothing uses its results, as under
    ``stop_gradient``, and JAX can't transpose it. So both loops carry what known references hold,
    and only what the first one leaves is written.
    """
    places = [i for i, one in enumerate(tracers) if isinstance(one.aval, _state.AbstractRef)]
    if not places or not all(tracers[i].pval.is_known() for i in places):
        return _while_evaluated(trace, *tracers, **params)
    refs, given = [tracers[i].pval.get_known() for i in places], list(tracers)

    def again(*values: Any) -> Any:
        return while_p.bind(*values, **params)

    avals = [tracer.aval for tracer in tracers]
    made = _discharge.discharge_state(with_consts(*stage(again, avals, named_info("while"))))
    with core.set_current_trace(trace.parent_trace):
        for i, ref in zip(places, refs, strict=True):
            given[i] = trace.new_const(_state_primitives.ref_get(ref, ()))
    with core.set_current_trace(trace):
        results = core.jaxpr_as_fun(made)(*given)
    count = len(made.out_avals) - len(refs)
    after = [trace.to_jaxpr_tracer(value).pval.get_known() for value in results[count:]]
    if any(value is None for value in after):
        # What it leaves in a reference is unknown: JAX's own rule then. What was made above
        # goes, as nothing uses it.
        return _while_evaluated(trace, *tracers, **params)
    with core.set_current_trace(trace.parent_trace):
        for ref, value in zip(refs, after, strict=True):
            _state_primitives.ref_set(ref, (), value)
    return list(map(trace.to_jaxpr_tracer, results[:count]))


partial_eval.custom_partial_eval_rules[while_p] = _while_partly


def _cond_vmap(
    axis_data: Any,
    args: Sequence[Any],
    dims: Sequence[Any],
    *,
    branches: tuple[Any, ...],
    **params: Any,
) -> Any:
    """Map a ``cond`` whose branches use references, which JAX refuses.

    Raises:
        TypeError: a branch writes to a reference that all examples share, and which branch runs
            differs between the examples, or what it writes.
    """
    made = _Branches.of(list(map(core.typeof, args)), branches)
    if not made.places:
        return _cond_mapped(axis_data, args, dims, branches=branches, **params)
    refs, given = [args[i] for i in made.places], list(args)
    for i, value in zip(made.places, made.read(refs), strict=True):
        given[i] = value  # mapped along the same axis as the reference
    results, axes = _cond_mapped(axis_data, given, dims, branches=made.branches, **params)
    after = list(results[made.count :])
    for k, (i, axis) in enumerate(zip(made.places, axes[made.count :], strict=True)):
        if dims[i] is not None:
            after[k] = batching.matchaxis(axis_data, axis, dims[i], after[k])
        elif axis is not None and made.written[k]:
            raise TypeError(
                "A Box that all examples of vmap share must be written alike for all of them, got "
                "a write in a lax.cond or lax.switch whose condition, or what it writes, differs "
                "between the examples. Call jax.vmap inside of the function that is tapped, or "
                "write jnp.where instead of lax.cond."
            )
    made.write(refs, after)
    return results[: made.count], axes[: made.count]


batching.fancy_primitive_batchers[cond_p] = _cond_vmap
