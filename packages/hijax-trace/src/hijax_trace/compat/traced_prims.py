"""HiPrims that hold traced programs: what JAX 0.12 makes of functions with flags set.

With ``jax_remat3``, ``jax_custom_vjp3`` and ``jax_custom_jvp3`` JAX stages ``jax.checkpoint``,
``custom_vjp`` and ``custom_jvp`` functions as HiPrims, not as primitives with jaxprs among their
parameters. Their operands are the values that the function closes over, then its arguments.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax._src import ad_checkpoint as _ad_checkpoint  # 0.10.2 - 0.12
from jax._src import hijax as _hijax  # 0.10.2 - 0.12, see below
from jax._src import stages as _stages  # 0.10.2 - 0.12
from jax._src.tree_util import tracing_registry as _registry  # 0.10.2 - 0.12

from .hijax import Zero, instantiate
from .jaxpr import as_function, with_consts
from .pjit import named_info
from .trace import stage

# Older versions have classes of these names, with other fields and behind unfinished flags.
_IS_NEW = hasattr(_hijax, "vmap_rule")  # 0.12


def _classes(module: Any, *names: str) -> tuple[type, ...]:
    return tuple(getattr(module, name) for name in names) if _IS_NEW else ()


_REMAT = _classes(_ad_checkpoint, "RematTraced")
_NAMES = _classes(_ad_checkpoint, "CheckpointName", "CheckpointNameFwd")
_VJP = _classes(_hijax, "CustomVJPTraced")
_JVP = _classes(_hijax, "CustomJVPTraced")


def is_custom_prim(prim: Any) -> bool:
    """Return whether a HiPrim is the call of a function with custom derivative rules."""
    return isinstance(prim, _VJP + _JVP)


def is_jvp_prim(prim: Any) -> bool:
    """Return whether a HiPrim is the call of a ``custom_jvp`` function."""
    return isinstance(prim, _JVP)


def is_staged_as_is(prim: Any) -> bool:
    """Return whether a HiPrim is one of JAX's, which stage nothing but their equation."""
    return isinstance(prim, _REMAT + _NAMES + _VJP + _JVP)


def prim_program(prim: Any) -> tuple[Any, tuple[int, ...]] | None:
    """Return the program that a HiPrim of JAX holds.

    Returns:
        The closed jaxpr, and for each input the number of the operand that it is; None if the
        HiPrim holds no jaxpr.
    """
    if isinstance(prim, _REMAT):
        jaxpr = prim.jaxpr
    elif isinstance(prim, _NAMES):
        jaxpr = _identity(prim.in_avals[0])
    elif isinstance(prim, _VJP):
        # The operands between belong to the forward rule alone.
        count, first = len(prim.in_avals_flat), len(jax.tree.leaves(prim.in_avals[0]))
        own = len(jax.tree.leaves(prim.in_avals[1]))
        return prim.traced.jaxpr, (*range(first), *range(first + own, count))
    elif isinstance(prim, _JVP):
        jaxpr = prim.traced.jaxpr
    else:
        return None
    return jaxpr, tuple(range(len(prim.in_avals_flat)))


@functools.lru_cache(maxsize=256)
def _identity(aval: Any) -> Any:
    return with_consts(*stage(lambda x: [x], [aval], named_info("checkpoint_name")))


def prim_with_program(prim: Any, jaxpr: Any, extra: int) -> Any:
    """Return the HiPrim of ``jax.checkpoint`` with another program.

    Args:
        extra: how many inputs it has before those of the old one.
    """
    if not isinstance(prim, _REMAT):
        return prim
    return _TappedRemat(jaxpr, prim.policy, more_flags(prim.prevent_cse, extra))


class _TappedRemat(*_REMAT):  # type: ignore[misc]
    """The call of a ``jax.checkpoint`` function, whose zero tangents stay symbolic.

    JAX makes arrays of them, and then a value of a handler, which must not be differentiated in a
    function with custom rules, would look as if it were.
    """

    jaxpr: Any

    def jvp(self, primals: Any, tangents: Any) -> Any:
        """Return the results and their tangents."""
        varying = [i for i, tangent in enumerate(tangents) if not isinstance(tangent, Zero)]

        def program(*values: Any) -> Any:
            given = [*primals]
            for i, value in zip(varying, values, strict=True):
                given[i] = value
            return as_function(self.jaxpr)(*given)

        first, along = (tuple(part[i] for i in varying) for part in (primals, tangents))
        return jax.jvp(program, first, along)


def more_flags(flags: Any, extra: int) -> Any:
    """Return ``prevent_cse`` of ``jax.checkpoint`` for more leading operands."""
    return (False,) * extra + flags if isinstance(flags, tuple) else flags


def prim_rule_of(prim: Any) -> Callable[..., Any]:
    """Return the derivative rule of a function's call.

    That of a ``custom_jvp`` is called with the operands and their tangents, that of a
    ``custom_vjp`` with which operands vary, and then the operands.
    """
    return prim.jvp_rule if isinstance(prim, _JVP) else prim.fwd


def undifferentiated(prim: Any) -> int:
    """Return how many leading operands of a function's call have no derivative."""
    closed_over = prim.in_avals[: 1 if isinstance(prim, _JVP) else 2]
    return len(jax.tree.leaves(closed_over))


def rule_types(prim: Any) -> list[Any]:
    """Return the types of what a rule is computed from, if all operands vary."""
    avals = list(prim.in_avals_flat)
    if not isinstance(prim, _JVP):
        return avals
    return avals + [aval.to_tangent_aval() for aval in avals[undifferentiated(prim) :]]


def rule_arguments(prim: Any, values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the arguments of a rule, from values of ``rule_types``."""
    count, first = len(prim.in_avals_flat), undifferentiated(prim)
    operands = jax.tree.unflatten(prim.in_tree, values[:count])
    if not isinstance(prim, _JVP):
        varies = [i >= first for i in range(count)]
        return (jax.tree.unflatten(prim.in_tree, varies), *operands)
    zeros = [Zero(aval.to_tangent_aval()) for aval in prim.in_avals_flat[:first]]
    return operands, jax.tree.unflatten(prim.in_tree, [*zeros, *values[count:]])


def rule_values(prim: Any, args: tuple[Any, ...]) -> list[Any]:
    """Return the values of ``rule_types``, from the arguments of a rule."""
    if not isinstance(prim, _JVP):
        return prim.in_tree.flatten_up_to(tuple(args[1:]))
    operands, tangents = map(prim.in_tree.flatten_up_to, args)
    return [*operands, *map(instantiate, tangents[undifferentiated(prim) :])]


def custom_with(
    prim: Any,
    jaxpr: Any,
    extra: Sequence[Any],
    rule: Callable[[Sequence[Any], tuple[Any, ...]], Any],
    refuse: Callable[[], None],
    bwd: Callable[..., Any] | None = None,
) -> Any:
    """Return the call of a function with custom derivative rules, with another program and rule.

    What the backward rule of a ``custom_vjp`` is given stays.

    Args:
        jaxpr: the closed program. Its first inputs are the extra operands.
        extra: the types of the extra operands, which come before all others.
        rule: ``rule(extra, args)`` computes what ``prim_rule_of(prim)(*args)`` does.
        refuse: raises, because an extra operand is differentiated.
        bwd: another backward rule, or None.
    """
    count, old = len(extra), prim.traced
    in_avals = ([*extra, *prim.in_avals[0]], *prim.in_avals[1:])
    given, named = jax.tree.unflatten(old.in_tree, old.jaxpr.in_avals)
    _, in_tree = _registry.flatten((([*extra, *given[0]], *given[1:]), named))
    params = {**old._params, "jaxpr": jaxpr}
    source = old._fun_sourceinfo
    parts = list(jaxpr.in_avals), params, in_tree, old.out_tree, [], source
    traced = _stages.Traced(*parts)  # pyrefly: ignore[bad-argument-count]  # 0.12 takes the source

    def own(args: Sequence[Any]) -> tuple[Any, ...]:
        return (list(args[0][count:]), *args[1:])

    if isinstance(prim, _JVP):

        def jvp_rule(primals: Any, tangents: Any) -> Any:
            if any(not isinstance(tangent, Zero) for tangent in tangents[0][:count]):
                refuse()
            return rule(primals[0][:count], (own(primals), own(tangents)))

        functools.update_wrapper(jvp_rule, prim.jvp_rule)
        return type(prim)(traced, jvp_rule, in_avals, prim.symbolic_zeros)

    def fwd(nzs_in: Any, *args: Any) -> Any:
        return rule(args[0][:count], (own(nzs_in), *own(args)))

    functools.update_wrapper(fwd, prim.fwd)
    # Without the rules of ``defremat``, which are not tapped, JAX makes them of the forward rule.
    made = _TappedVjp(
        traced,
        fwd,
        prim.bwd if bwd is None else bwd,
        in_avals,
        prim.symbolic_zeros,
        prim.opt_remat,
        prim.with_logs,
        None,
        prim.bwd_accums if bwd is None else None,
        generic_batching=prim.generic_batching,
    )
    made.extra, made.refuse = count, refuse
    return made


class _TappedVjp(*_VJP):  # type: ignore[misc]
    """The call of a ``custom_vjp`` function that says which operand has no derivative."""

    extra: int
    refuse: Callable[[], None]

    def vjp_fwd(self, nzs_in: Any, *args: Any) -> Any:
        """Return the results, and the residuals of ``vjp_bwd``."""
        if any(nzs_in[0][: self.extra]):
            self.refuse()
        return super().vjp_fwd(nzs_in, *args)  # type: ignore[misc]

    lin = vjp_fwd
