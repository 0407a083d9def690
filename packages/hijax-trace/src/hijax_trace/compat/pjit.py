"""Primitives that hold programs: calls, loops, branches, custom rules, shard_map."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import jax
from jax._src import api as _api  # 0.10.2 - 0.12
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
from jax._src import tree_util as _tree_util  # 0.10.2 - 0.12
from jax._src.interpreters import ad  # 0.10.2 - 0.12
from jax._src.interpreters import partial_eval as pe  # 0.10.2 - 0.12
from jax._src.lax.control_flow import conditionals as _conditionals  # 0.10.2 - 0.12
from jax._src.lax.control_flow import loops as _loops  # 0.10.2 - 0.12
from jax._src.lax.control_flow import solves as _solves  # 0.10.2 - 0.12

from .jaxpr import open_of

try:
    from jax._src import flattree as _flat_tree  # pyrefly: ignore[missing-module-attribute]
except ImportError:  # 0.10.2; 0.11 - 0.12 have it
    _flat_tree: Any = None

PjitFunction: type = type(jax.jit(lambda: None))
"""The C++ type of every jitted function."""

jit_p = _pjit.jit_p
scan_p = _loops.scan_p
while_p = _loops.while_p
cond_p = _conditionals.cond_p
custom_jvp_call_p = _custom_derivatives.custom_jvp_call_p
custom_vjp_call_p = _custom_derivatives.custom_vjp_call_p
linear_call_p = _custom_derivatives.linear_call_p
CustomVJPException = ad.CustomVJPException
custom_vmap_p = _custom_batching.custom_vmap_p
linear_solve_p = _solves.linear_solve_p
shard_map_p = _shard_map.shard_map_p
"""The primitives whose programs can't be replaced by changing one parameter alone."""


jit_staging_rule: FunctionType = _pjit.pjit_staging_rule
"""Stages the call of a jitted function, or inlines its body.

Called with the trace, the source line and the operands. The parameters are keywords.
"""


def keep_call(trace: Any, source_info: Any, *operands: Any, **params: Any) -> Any:
    """Stage a jitted call in a jaxpr, even one to be inlined."""
    return trace.default_process_primitive(jit_p, operands, params, source_info=source_info)


def named_info(name: str) -> Any:
    """Return ``debug_info`` for a name, without a signature."""
    return core.DebugInfo(name, name, None, None)


def named_call(name: str, jaxpr: Any, values: Sequence[Any]) -> list[Any]:
    """Bind a call of a closed jaxpr, as jitted functions do."""
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


class SharedParams(dict[str, Any]):
    """The parameters of several equal equations.

    Attributes:
        left: the call after dead code is removed, if all its results are used: the inputs that
            it uses, and its parameters. None before that, and on 0.12, which knows it without.
        is_high: whether the equations hold a HiPrim. None before that is asked.
    """

    left: tuple[list[bool], SharedParams] | None = None
    is_high: bool | None = None


if not hasattr(_hijax, "vmap_rule"):  # 0.10.2, 0.11.2
    _dce_jit = pe.dce_rules[jit_p]

    def _dce_call(used_outputs: list[bool], eqn: Any) -> tuple[list[bool], Any]:
        """Remove what a call does not need: for equal calls once.

        Keep a call whose name is more than a string, if all of it is used, as 0.12 does.
        """
        params, is_whole = eqn.params, all(used_outputs)
        shares = type(params) is SharedParams and is_whole and not eqn.effects
        if shares and params.left is not None:
            used_inputs, left = params.left
            inputs = [x for x, used in zip(eqn.invars, used_inputs, strict=True) if used]
            rest = eqn.effects, eqn.source_info, eqn.ctx
            again = core.JaxprEqn(inputs, eqn.outvars, eqn.primitive, left, *rest)
            return list(used_inputs), again
        used_inputs, again = _dce_jit(used_outputs, eqn)
        if again is None:
            return used_inputs, None
        if is_whole and all(used_inputs) and type(params["name"]) is not str:
            again = eqn
        if shares and not again.effects:
            params.left = used_inputs, SharedParams(again.params)
        return used_inputs, again

    pe.dce_rules[jit_p] = _dce_call

_EARLY: tuple[Any, ...] = (_api.Inline.JAX_EARLY,) if hasattr(_api, "Inline") else (True,)

UNSPECIFIED: Any = _sharding_impls.UNSPECIFIED
"""No sharding is asked for."""

_NOT_INLINE: Any = _api.Inline.AUTO if hasattr(_api, "Inline") else False  # 0.11: an enumeration


def wrap_fun(fn: Callable[..., Any], debug_info: Any) -> Any:
    """Return a function as JAX's transformations take it."""
    return lu.wrap_init(fn, debug_info=debug_info)


def rule_like(rule: Any, change: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Any:
    """Return the backward rule of a ``custom_vjp_call``, changed by a function of functions."""
    return lu.wrap_init(change(rule.call_wrapped), debug_info=rule.debug_info)


with_zeros: Callable[[Any, Sequence[Any]], Any] = _custom_derivatives._handle_consts_in_bwd
"""Returns the backward rule of a ``custom_vjp_call`` for more leading operands of some types, whose
cotangents are zeros."""


def call_key(eqn: Any) -> tuple | None:
    """Return a key that is equal for jitted calls that are treated alike; None for others.

    It holds among equations that are alive.
    """
    if eqn.primitive is not jit_p:
        return None
    params = eqn.params
    # A marker's name is of another class than those of jitted functions.
    own = id(params["jaxpr"]), type(params["name"]), params["inline"]
    places = params["in_shardings"], params["out_shardings"]
    return *own, *places, params["in_layouts"], params["out_layouts"]


def is_inlined(primitive: Any, params: dict[str, Any]) -> bool:
    """Return whether JAX inlines a call while it traces."""
    return (
        primitive is jit_p
        and params["inline"] in _EARLY
        and all(sharding is UNSPECIFIED for sharding in params["in_shardings"])
        and all(sharding is UNSPECIFIED for sharding in params["out_shardings"])
        and not any(params["in_layouts"])
        and not any(params["out_layouts"])
    )


# Since 0.11 JAX traces with a separate registry of pytrees, in which None is a leaf.
_has_registry = hasattr(_tree_util, "treedef_tuple_tracing_registry")
_registry = _tree_util.tracing_registry if _has_registry else _tree_util.default_registry
_treedef_tuple: Callable[[Sequence[Any]], Any] = getattr(
    _tree_util, "treedef_tuple_tracing_registry", jax.tree_util.treedef_tuple
)


def with_rule(rule: Any, wrap: Callable[..., Any]) -> Any:
    """Return the vmap rule of a ``custom_vmap_call``, wrapped."""
    again = copy.copy(rule)
    again.rule = wrap(rule.rule)
    return again


def rule_after(in_tree: Any, rule: Any, count: int) -> tuple[Any, Any]:
    """Return the structure and vmap rule of a ``custom_vmap_call`` with operands before its own."""

    leaf = _registry.flatten(0)[1]
    return _treedef_tuple([*[leaf] * count, *in_tree.children()]), _RuleAfter(rule, count)


class _RuleAfter(_custom_batching.ClosedRule):
    """A vmap rule that knows nothing of the first operands, which an engine has added."""

    def __init__(self, rule: Any, count: int):
        self.__dict__.update(rule.__dict__)
        self._count = count + getattr(rule, "_count", 0)  # an engine around may add others

    def __call__(self, size: int, batched: Sequence[Any], *args: Any) -> Any:
        return super().__call__(size, batched[self._count :], *args[self._count :])


def in_shard_map(params: dict[str, Any]) -> contextlib.ExitStack:
    """Return a context manager to trace a ``shard_map``'s body in."""
    mesh, manual = params["mesh"], params["newly_manual_axes"]
    context = contextlib.ExitStack()
    context.enter_context(_shard_map._extend_axis_env(mesh, manual))
    context.enter_context(_mesh.use_abstract_mesh(_shard_map._as_manual_mesh(mesh, manual)))
    context.enter_context(_config._check_vma(params["check_vma"]))
    return context


def shard_of(aval: Any, spec: Any, params: dict[str, Any]) -> Any:
    """Return the type of a device's part of a ``shard_map``'s operand."""
    return core.shard_aval(
        params["mesh"], params["newly_manual_axes"], params["check_vma"], spec, aval
    )


def shard_map_options(params: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of ``jax.shard_map`` apart from ``out_specs``."""
    return {
        "mesh": params["mesh"],
        "in_specs": tuple(params["in_specs"]),
        "axis_names": set(params["newly_manual_axes"]),
        "check_vma": params["check_vma"],
    }


def more_scan_consts(params: dict[str, Any], extra: int) -> dict[str, Any]:
    """Return a scan's parameters with ``extra`` more leading constants."""
    if "num_consts" in params:  # 0.10.2
        return {**params, "num_consts": params["num_consts"] + extra}
    consts, carry, xs = params["ft_in"].unpack()
    consts = _flat_tree.nones(len(consts) + extra)
    return {**params, "ft_in": _flat_tree.pack((consts, carry, xs))}


def more_scan_steps(params: dict[str, Any], extra: int) -> dict[str, Any]:
    """Return a scan's parameters with ``extra`` more trailing operands."""
    if "ft_in" not in params:  # 0.10.2 counts the others alone
        return params
    consts, carry, xs = params["ft_in"].unpack()
    xs = _flat_tree.nones(len(xs) + extra)
    return {**params, "ft_in": _flat_tree.pack((consts, carry, xs))}


def scan_parts(params: dict[str, Any]) -> tuple[int, int]:
    """Return how many constants and carried values a scan has."""
    if "num_consts" in params:  # 0.10.2
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()
    return len(consts), len(carry)


if "to_lojax" not in vars(core.closed_call_p):  # 0.10.2
    # 0.10.2 has no rule for what remat of a scan becomes. The rule changes nothing that worked.
    def _closed_call_to_lojax(*args: Any, call_jaxpr: Any) -> Any:
        return core.jaxpr_as_fun(call_jaxpr)(*args)

    core.closed_call_p.to_lojax = _closed_call_to_lojax
