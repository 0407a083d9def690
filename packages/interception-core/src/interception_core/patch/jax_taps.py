"""Taps on JAX, which keep the scope right in JAX's machinery.

* A name scope extends the module path of the current scope.
* JAX's rules (derivatives, batching, lowering) call lax functions that are not operations of the
  program, so the scope is asleep while they run.
* The rules of ``custom_vjp``, ``custom_jvp`` and ``custom_vmap`` belong to the program, but may run
  after the scope has ended, so they take the scope along.
* The body of a Pallas kernel works on blocks of memory, for compilers that know few operations, so
  the scope ends there.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any

import jax
import jax.custom_batching

from .. import _compat
from .context import CONTEXT
from .dispatch import run
from .patches import CodePatch, Dispatch, Patch
from .scope import OUTSIDE, Entered, Scope, State
from .targets import CallSites, Sites


def _enter_name(site: Any, original: Callable, state: State, args: tuple, kwargs: dict) -> Any:
    (name_scope,) = args
    result = original(name_scope)
    if isinstance(state, Scope):
        scope = state.extended(str(name_scope.name))
        scope.opener, scope.restore = name_scope, CONTEXT(scope)
        scope.restore.__enter__()
    return result


def _exit_name(site: Any, original: Callable, state: State, args: tuple, kwargs: dict) -> Any:
    name_scope, *exc_info = args
    if isinstance(state, Scope) and state.opener is name_scope:
        restore, state.opener, state.restore = state.restore, None, None
        restore.__exit__(*exc_info)  # it refers to the state, which is freed now
    return original(*args, **kwargs)


def _lower(site: Any, original: Callable, state: State, args: tuple, kwargs: dict) -> Any:
    with CONTEXT(None):
        return original(*args, **kwargs)


def _rules(site: Any, original: Callable, state: State, args: tuple, kwargs: dict) -> Any:
    if not isinstance(state, Scope) or state.asleep:
        return original(*args, **kwargs)
    settled = _compat.settled() if state.observed else contextlib.nullcontext()
    with CONTEXT(state.turned(asleep=True)), settled:
        return original(*args, **kwargs)


def _bind(site: Any, original: Callable, state: State, args: tuple, kwargs: dict) -> Any:
    """Show a primitive to the observers, then run its rule."""
    if isinstance(state, Scope) and state.observed and not state.asleep:
        level: Scope | None = state
        while level is not None:
            observer, outer = level.activation.observer, level.parent
            if observer is not None:
                with CONTEXT(OUTSIDE) if outer is None else Entered(outer):
                    result = observer.bind(level.path, *args, **kwargs)
                if result is not NotImplemented:
                    return result
            level = outer
        trace, primitive, _, params = args
        if _compat.runs_custom_rule(trace, primitive, params):
            return original(*args, **kwargs)
    return _rules(site, original, state, args, kwargs)


def _trace(site: Any, original: Callable, state: State, args: tuple, kwargs: dict) -> Any:
    if isinstance(state, Scope) and _compat.traces_kernel(*args, **kwargs):
        # Not asleep: what the body calls has other traces, which must not serve the program.
        with CONTEXT(OUTSIDE):
            return original(*args, **kwargs)
    return original(*args, **kwargs)


def _solve(site: Any, original: Callable, state: State, args: tuple, kwargs: dict) -> Any:
    """Trace functions that JAX transposes, now or later."""
    if not isinstance(state, Scope) or state.observed:
        return original(*args, **kwargs)
    with CONTEXT(state.transposed()):
        return original(*args, **kwargs)


def _call(sites: CallSites, original: Callable, state: State, args: tuple, kwargs: dict) -> Any:
    """Run ``instance(...)`` of a class whose ``__call__`` is patched."""
    instance, rest = args[0], args[1:]
    site = sites.get(id(instance))

    def call(*args: Any, **kwargs: Any) -> Any:
        return original(_with_scope(instance, state), *args, **kwargs)

    alone: Scope | None = None
    if isinstance(state, Scope) and state.parent is None and not state.asleep:
        alone = state
    # A site stays when its interceptor is gone: it says nothing about the one that is active.
    if site is not None and (alone is None or site in alone.activation.table):
        return run(site, call, state, rest, kwargs)
    if alone is not None and alone.activation.observer is not None:
        return alone.activation.observer.call(instance, call, rest, kwargs)
    return call(*rest, **kwargs)


def _with_scope(instance: Any, state: State) -> Any:
    """Return an instance, whose custom rules take the state along."""
    rules = _CUSTOM_RULES.get(type(instance))
    if rules is None:
        return instance
    # copy.copy fails on 0.10.2, where custom_vjp.__new__ takes the function.
    carried = object.__new__(type(instance))
    carried.__dict__.update(instance.__dict__)
    for name, carry in rules.items():
        if getattr(instance, name, None) is not None:
            setattr(carried, name, carry(getattr(instance, name), state))
    return carried


def _carry(rule: Callable, state: State) -> Callable:
    observed = isinstance(state, Scope) and state.observed

    @functools.wraps(rule)
    def carried(*args, **kwargs):
        with Entered(state), _compat.unsettled() if observed else contextlib.nullcontext():
            return rule(*args, **kwargs)

    return carried


def _carry_backward(rule: Callable, state: State) -> Callable:
    """Return a backward rule that is tapped where it runs.

    It is tapped if the tap is around the differentiation: in the scope in which it runs, not in
    that of the call. A rule of a call in a handler is never tapped.
    """
    if not isinstance(state, Scope):
        return _carry(rule, state)

    @functools.wraps(rule)
    def carried(*args, **kwargs):
        now = CONTEXT.value
        if not isinstance(now, Scope) or not now.asleep:
            return rule(*args, **kwargs)
        unsettled = _compat.unsettled() if now.observed else contextlib.nullcontext()
        with Entered(now.turned(asleep=False)), unsettled:
            return rule(*args, **kwargs)

    return carried


_CUSTOM_RULES: dict[type, dict[str, Callable[[Callable, State], Callable]]] = {
    jax.custom_jvp: {"jvp": _carry},
    # With optimize_remat the function may replace the forward rule.
    jax.custom_vjp: {"fun": _carry, "fwd": _carry, "bwd": _carry_backward},
    jax.custom_batching.custom_vmap: {"vmap_rule": _carry},
}

SITES = Sites(run, _call)

_TAPPED: tuple[tuple[FunctionType, Dispatch], ...] = (
    (_compat.NameScope.__enter__, _enter_name),
    (_compat.NameScope.__exit__, _exit_name),
    (_compat.lower_jaxpr_to_module, _lower),
    (_compat.backward_pass, _rules),
    (jax.linear_transpose, _solve),
    (jax.lax.custom_linear_solve, _solve),
    *((runner, _bind) for runner in _compat.rule_runners),
    *((evaluation, _rules) for evaluation in _compat.evaluations),
    *((tracer, _trace) for tracer in _compat.tracers),
)

ALWAYS: tuple[Patch, ...] = (
    *(CodePatch(fn, run, None, keep_signature=False) for fn, run in _TAPPED),
    *(SITES.call_patch(cls)[0] for cls in _CUSTOM_RULES),
)
"""Installed with every scope."""
