"""Jaxprs: what is in them, and how they are changed."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from jax._src import core  # 0.10.2 - 0.12
from jax._src import hijax as _hijax  # 0.10.2 - 0.12, see below
from jax._src.interpreters import partial_eval as pe  # 0.10.2 - 0.12
from jax._src.nn import functions as nn_functions  # 0.10.2 - 0.12
from jax.extend.core import primitives

from .deferred import deferred_p

Jaxpr: type = core.Jaxpr
ClosedJaxpr: type = getattr(core, "ClosedJaxpr", core.Jaxpr)
JAXPRS: tuple[type, ...] = (core.Jaxpr,) if ClosedJaxpr is core.Jaxpr else (core.Jaxpr, ClosedJaxpr)
"""0.10.2 has open and closed jaxprs. Since 0.11 there is one class, which may hold constants."""
Literal: type = core.Literal


def open_of(jaxpr: Any) -> Any:
    """Return the jaxpr without its constants' values (0.10.2), or itself."""
    return jaxpr.jaxpr if type(jaxpr) is ClosedJaxpr else jaxpr


def is_of_jax_nn(jaxpr: Any, names: Sequence[str]) -> bool:
    """Return whether a jaxpr is of one of ``jax.nn``'s functions."""
    source = open_of(jaxpr).debug_info.func_src_info or ""
    return any(source.startswith(f"{name} at {_NN}:") for name in names)


_NN = nn_functions.__file__

T = TypeVar("T")


def once_per_jaxpr(fn: Callable[[Any], T]) -> Callable[[Any], T]:
    """Make a function of an open jaxpr one of any, whose result is kept while the jaxpr lives."""
    known: weakref.WeakKeyDictionary[Any, T] = weakref.WeakKeyDictionary()

    @functools.wraps(fn)
    def once(jaxpr: Any) -> T:
        jaxpr = open_of(jaxpr)
        found = known.get(jaxpr)
        if found is None:
            found = known[jaxpr] = fn(jaxpr)
        return found

    return once


def consts_of(jaxpr: Any) -> list[Any]:
    """Return the values of a closed jaxpr's constants."""
    return list(getattr(jaxpr, "consts", ()))


def is_open(jaxpr: Any) -> bool:
    """Return whether a jaxpr must be open: in remat and shard_map."""
    return len(JAXPRS) > 1 and isinstance(jaxpr, core.Jaxpr)


def as_closed(jaxpr: Any) -> Any:
    """Return a jaxpr, closed on 0.10.2. An open one must have no constants."""
    return jaxpr if isinstance(jaxpr, ClosedJaxpr) else pe.close_jaxpr(jaxpr)


as_function: Callable[[Any], Callable[..., list[Any]]] = core.jaxpr_as_fun
"""Returns the function of flat values that a closed jaxpr is."""


def positional_effects(jaxpr: Any) -> frozenset[Any]:
    """Return a jaxpr's effects, with inputs by number."""
    return frozenset(core.positional_effects(jaxpr))


def with_consts(jaxpr: Any, consts: list[Any]) -> Any:
    """Close a jaxpr, as ``stage`` returned it, with its constants."""
    if (core.Jaxpr,) == JAXPRS:
        return jaxpr.with_consts(consts) if consts else jaxpr
    return core.ClosedJaxpr(jaxpr, consts)


def inputs_of(jaxpr: Any) -> list[Any]:
    """Return the variables of a jaxpr's constants and arguments, in this order.

    Since 0.11 a constant without a value is an ordinary leading argument.
    """
    return jaxpr.all_invars if (core.Jaxpr,) == JAXPRS else [*jaxpr.constvars, *jaxpr.invars]


def used_inputs(jaxpr: Any) -> list[bool]:
    """Return which arguments of an open jaxpr are used."""
    return without_unused(jaxpr)[1]


def without_unused(jaxpr: Any) -> tuple[Any, list[bool]]:
    """Return an open jaxpr without unused arguments and equations, and which arguments are used."""
    left, used, *_ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
    return left, list(used)


def used_equations(jaxpr: Any) -> list[bool]:
    """Return which equations of an open jaxpr are used."""
    used = {var for var in jaxpr.outvars if type(var) is not Literal}
    found = []
    for eqn in reversed(jaxpr.eqns):
        found.append(bool(eqn.effects) or not used.isdisjoint(eqn.outvars))
        if found[-1]:
            used.update(atom for atom in eqn.invars if type(atom) is not Literal)
    return found[::-1]


consts_as_args: Callable[[Any], Any] = pe.convert_constvars_jaxpr
"""Returns a jaxpr with its constants as leading arguments."""
typeof = core.typeof
"""Public as ``jax.typeof``."""
same_type: Callable[[Any, Any], bool] = core.typematch
"""Returns whether two types are equal, ignoring weak types."""


def is_symbolic(aval: Any) -> bool:
    """Return whether a type has a size that is not a number, as in ``jax.export``."""
    return not all(isinstance(size, int) for size in getattr(aval, "shape", ()))


def has_high_values(jaxpr: Any) -> bool:
    """Return whether a jaxpr itself has values of high-level types."""
    # A jaxpr is high for its HiPrims, too, most of which are of arrays.
    return jaxpr.is_high and _has_high_values(jaxpr)


@once_per_jaxpr
def _has_high_values(jaxpr: Any) -> bool:
    values = [*inputs_of(jaxpr), *(var for eqn in jaxpr.eqns for var in eqn.outvars)]
    return any(is_high_type(var.aval) for var in values)


def is_high_type(aval: Any) -> bool:
    """Return whether a type is a high-level one."""
    return bool(aval.is_high)


def is_array_type(aval: Any) -> bool:
    """Return whether a type is one of arrays, not of references or of high-level values."""
    return type(aval) is core.ShapedArray


def operand_count(eqn: Any) -> int:
    """Return how many operands an equation has, staged or being staged."""
    return len(eqn.in_tracers if isinstance(eqn, pe.TracingEqn) else eqn.invars)


def forgettable(jaxpr: Any) -> dict[Any, list[Any]]:
    """Return the variables that each equation is the last to use."""
    after: dict[Any, list[Any]] = {}
    for var, eqn in core.last_used(jaxpr).items():
        if eqn is not None:
            after.setdefault(eqn, []).append(var)
    for eqn in jaxpr.eqns:
        after.setdefault(eqn, []).extend(v for v in eqn.outvars if isinstance(v, core.DropVar))
    return after


_HOLDING: dict[Any, bool] = {}
_OF_JAX = frozenset(p for p in vars(primitives).values() if isinstance(p, core.Primitive))


def holds_jaxprs(eqn: Any) -> bool:
    """Return whether an equation's primitive holds programs.

    The answer is kept for each primitive, since programs have thousands of equations, but for those
    of libraries that may hold some in another equation.
    """
    primitive = eqn.primitive
    held = _HOLDING.get(primitive)
    if held is None:
        parts = (
            part
            for value in eqn.params.values()
            for part in (value if isinstance(value, tuple) else (value,))
        )
        # Some hold them as a Python object.
        held = primitive in (_hijax.call_hi_primitive_p, deferred_p)
        held = held or any(isinstance(part, JAXPRS) for part in parts)
        if held or primitive in _OF_JAX:
            _HOLDING[primitive] = held
    return held


def has_only_axes(effects: Any) -> bool:
    """Return whether effects are those of collectives, and there are any."""
    return bool(effects) and all(isinstance(one, core.NamedAxisEffect) for one in effects)


def has_effects(params: dict[str, Any]) -> bool:
    """Return whether a jaxpr among an equation's parameters has effects."""
    return any(
        open_of(jaxpr).effects
        for value in params.values()
        for jaxpr in (value if isinstance(value, tuple) else (value,))
        if isinstance(jaxpr, JAXPRS)
    )


def with_shared(jaxpr: Any, avals: Sequence[Any], places: Sequence[int]) -> Any:
    """Return a jaxpr with the first inputs of several jaxprs.

    Args:
        avals: the types of all first inputs.
        places: which of them its own first inputs are; several may be the same.
    """
    opened = open_of(jaxpr)
    first: list[Any] = [None] * len(avals)
    again: dict[Any, Any] = {}
    for place, var in zip(places, opened.invars, strict=False):
        if first[place] is None:
            first[place] = var
        else:
            again[var] = first[place]
    new = core.gensym()
    first = [new(aval) if var is None else var for var, aval in zip(first, avals, strict=True)]
    invars = [*first, *opened.invars[len(places) :]]
    info = opened.debug_info._replace(arg_names=None)
    wide = opened.replace(invars=invars, debug_info=info)
    if again:

        def renamed(atoms: Sequence[Any]) -> list[Any]:
            return [x if type(x) is Literal else again.get(x, x) for x in atoms]

        eqns = [eqn.replace(invars=renamed(eqn.invars)) for eqn in wide.eqns]
        wide = wide.replace(eqns=eqns, outvars=renamed(wide.outvars))
    return _closed_like(jaxpr, wide)


def with_results(jaxpr: Any, places: Sequence[int]) -> Any:
    """Return a jaxpr with some of its results, by number."""
    opened = open_of(jaxpr)
    info = opened.debug_info._replace(result_paths=None)
    outvars = [opened.outvars[place] for place in places]
    return _closed_like(jaxpr, opened.replace(outvars=outvars, debug_info=info))


def _closed_like(jaxpr: Any, opened: Any) -> Any:
    return opened if is_open(jaxpr) else with_consts(opened, consts_of(jaxpr))


def without_last_input(jaxpr: Any, names: Any) -> Any:
    """Return an open jaxpr without its last argument, which is unused.

    Args:
        names: those of the other arguments, if they are as many.
    """
    fits = names is not None and len(names) == len(jaxpr.invars) - 1
    info = jaxpr.debug_info._replace(arg_names=names if fits else None)
    return jaxpr.replace(invars=jaxpr.invars[:-1], debug_info=info)


def is_as_traced(jaxpr: Any) -> bool:
    """Return whether a jitted function was traced to a jaxpr: JAX did not batch or derive it.

    JAX's rules keep a call's name, but not those of its arguments and results.
    """
    info = open_of(jaxpr).debug_info
    return info is not None and None not in (info.arg_names, info.result_paths)


def label(jaxpr: Any) -> str:
    """Return a body's label, such as ``scan(body)``."""
    return _label(open_of(jaxpr).debug_info)


def labelled(jaxpr: Any, like: Any) -> Any:
    """Return a jaxpr with another jaxpr's label."""
    opened, info = open_of(jaxpr), open_of(like).debug_info
    if info is None or opened.debug_info is None:
        return jaxpr
    info = opened.debug_info._replace(traced_for=info.traced_for, func_src_info=info.func_src_info)
    again = opened.replace(debug_info=info)
    return again if opened is jaxpr else with_consts(again, consts_of(jaxpr))


def _label(info: Any) -> str:
    if info is None:
        return "trace"
    return f"{info.traced_for.split(' ')[0]}({info.func_name})".replace("/", ".")


def step_type(aval: Any, axis: int = 0) -> Any:
    """Return the type of one step along an axis."""
    return core.mapped_aval(aval.shape[axis], axis, aval)


lower_jaxpr: Callable[[Any], Any] = pe.lower_jaxpr2
"""Returns the lojax jaxpr of a jaxpr with hi types and primitives."""
