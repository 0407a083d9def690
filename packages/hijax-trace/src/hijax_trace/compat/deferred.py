"""The primitive ``deferred`` and JAX's rules for it; see ``staging.deferred``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from jax._src import ad_util as _ad_util  # 0.10.2 - 0.12
from jax._src import core  # 0.10.2 - 0.12
from jax._src import dispatch as _dispatch  # 0.10.2 - 0.12
from jax._src.interpreters import (
    ad,  # 0.10.2 - 0.12
    batching,  # 0.10.2 - 0.12
)
from jax._src.interpreters import mlir as _mlir  # 0.10.2 - 0.12
from jax._src.interpreters import partial_eval as pe  # 0.10.2 - 0.12

from .ahead import is_transposing

deferred_p = core.Primitive("deferred")
"""Calls its parameter ``function``, a ``staging.deferred.Function``."""
deferred_p.multiple_results = True


def batch_type(axis: Any, place: int, aval: Any) -> Any:
    """Return the type of all examples of a ``vmap``."""
    return core.unmapped_aval(axis.size, place, aval, axis.explicit_mesh_axis)


def batched(jaxpr: Any, axis: Any, axes: Sequence[int | None]) -> tuple[Any, tuple[Any, ...]]:
    """Return the closed jaxpr of all examples of a ``vmap``, as JAX makes it of a call.

    Returns:
        The jaxpr, and the mapped axis of each result, or None.
    """
    return batching.batch_jaxpr2(jaxpr, axis, tuple(axes))


_DERIVATIVES = (ad.JVPTrace, ad.LinearizeTrace)
_OTHERS = (batching.BatchTrace, pe.JaxprTrace)


def is_derivative(trace: Any) -> bool:
    """Return whether a trace takes a derivative."""
    return isinstance(trace, _DERIVATIVES)


class Transforms(NamedTuple):
    """What lies between a trace and the one below that builds a jaxpr.

    Attributes:
        staging: the trace below. None if none builds a jaxpr, or something else lies between than
            maps, derivatives, transposes and partial evaluation; all others are False then.
        maps: whether ``vmap`` does.
        derives: whether a derivative or transpose does.
        transposes: whether a transpose does.
    """

    staging: Any = None
    maps: bool = False
    derives: bool = False
    transposes: bool = False


def transforms_above_staging(trace: Any) -> Transforms:
    """Return what lies between a trace and the one below that builds a jaxpr."""
    maps = derives = transposes = False
    while isinstance(trace, _DERIVATIVES + _OTHERS):
        maps |= isinstance(trace, batching.BatchTrace)
        derives |= isinstance(trace, _DERIVATIVES)
        transposes |= is_transposing(trace)
        trace = trace.parent_trace
    if not isinstance(trace, pe.DynamicJaxprTrace):
        return Transforms()
    return Transforms(trace, maps, derives or transposes, transposes)


def differentiated(jaxpr: Any, nonzero: Sequence[int]) -> list[int]:
    """Return which results of a closed jaxpr have a tangent that is not zero."""
    flags = [i in nonzero for i in range(len(jaxpr.in_avals))]
    _, found = ad.jvp_jaxpr(jaxpr, flags, False)
    return [i for i, one in enumerate(found) if one]


def _is_high(*avals: Any, function: Any) -> bool:
    # What handlers made stays in the program that is lowered, and may hold HiPrims, as JAX 0.12
    # makes of ``custom_jvp`` functions with its flag. Nothing transposes it then.
    return function.program.is_from_handler and function.program.jaxpr.is_high


deferred_p.is_high = _is_high


@deferred_p.def_impl
def _run(*values: Any, function: Any) -> list[Any]:
    return function(*values)


deferred_p.to_lojax = _run


@deferred_p.def_effectful_abstract_eval
def _types(*avals: Any, function: Any) -> tuple[list[Any], Any]:
    return function.out_avals, function.effects


def _jvp(primals: Any, tangents: Any, *, function: Any) -> tuple[list[Any], list[Any]]:
    results = deferred_p.bind(*primals, function=function)
    zeros = [ad.Zero(aval.to_tangent_aval()) for aval in function.out_avals]
    nonzero = [i for i, tangent in enumerate(tangents) if type(tangent) is not ad.Zero]
    first = function.first_linear
    if nonzero and first is not None and nonzero[0] >= first:
        # The derivative of a linear function is the same everywhere. Who transposes it next, as
        # ``tangent_solve`` of a root does, needs one that does not depend on where.
        along = map(_ad_util.instantiate, tangents[first:])
        return results, deferred_p.bind(*primals[:first], *along, function=function)
    derived = function.tangent(nonzero)
    if not nonzero or not derived.results:
        return results, zeros
    found = deferred_p.bind(*primals, *(tangents[i] for i in nonzero), function=derived)
    pairs = dict(zip(derived.results, found, strict=True))
    return results, [pairs.get(i, zero) for i, zero in enumerate(zeros)]


def _transpose(cts: Sequence[Any], *values: Any, function: Any) -> list[Any]:
    linear = [i for i, value in enumerate(values) if ad.is_undefined_primal(value)]
    given = [i for i, ct in enumerate(cts) if type(ct) is not ad.Zero]
    known = [value for value in values if not ad.is_undefined_primal(value)]
    if not given:
        return [None] * len(values)
    derived = function.transposed(linear, given)
    found = deferred_p.bind(*known, *(cts[i] for i in given), function=derived)
    pairs = dict(zip(linear, found, strict=True))
    return [pairs.get(i) for i in range(len(values))]


def _batch(axis: Any, values: Any, dims: Any, *, function: Any) -> tuple[list[Any], list[Any]]:
    if all(dim is None for dim in dims):
        results = deferred_p.bind(*values, function=function)
        return results, [None] * len(results)
    # JAX's rules compute some axes with NumPy, whose integers are not ints.
    axes = tuple(None if dim is None else int(dim) for dim in dims)
    whole = function.batched(axis, axes)
    return deferred_p.bind(*values, function=whole), list(whole.axes)


ad.primitive_jvps[deferred_p] = _jvp
ad.primitive_transposes[deferred_p] = _transpose
batching.fancy_primitive_batchers[deferred_p] = _batch
_mlir.register_lowering(deferred_p, _mlir.lower_fun(_run, multiple_results=True))
# JAX looks for primitives that are lowered for known devices, such as a kernel's rule for
# partitioning, in parameters that are jaxprs: it does not see those of a handler's program.
_dispatch.prim_requires_devices_during_lowering.add(deferred_p)
