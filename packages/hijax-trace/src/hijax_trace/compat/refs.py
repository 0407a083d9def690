"""References: JAX's mutable arrays, of which Boxes are made."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
from jax._src import (
    ad_util,  # 0.10.2 - 0.12
    core,  # 0.10.2 - 0.12
)
from jax._src.custom_derivatives import custom_jvp_call_p  # 0.10.2 - 0.12
from jax._src.interpreters import ad, batching  # 0.10.2 - 0.12
from jax._src.lax import lax as _lax  # 0.10.2 - 0.12
from jax._src.state import discharge as _discharge  # 0.10.2 - 0.12
from jax._src.state import primitives as _state_primitives  # 0.10.2 - 0.12
from jax._src.state import types as _state  # 0.10.2 - 0.12


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
