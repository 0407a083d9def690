"""Patches of JAX that are installed while TraceEngine stages a program.

Those of every engine are in interception-core. These let

* a jitted call stay an equation, where JAX would inline it,
* what a program computes while it traces a function ahead be an operation of the trace around,
* operations that JAX hoists out of a loop, or transposes at once, be told from the program's,
* ``jax.eval_shape`` ask no handler: it runs nothing.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import jax

from interception_core.engine_api import Observer, Patch, Taps, is_settled, patch_calls, settled

from .. import compat
from .watcher import Watcher


def _stage_jitted(original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    # JAX's rules keep such calls, too: the derivative of what they leave sums in the calls' order.
    for observer in Taps.observers():
        if isinstance(observer, Watcher) and observer.defers_inlining(args[0]):
            return compat.keep_call(*args, **kwargs)
    return original(*args, **kwargs)


def _evaluate(original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Compute a primitive of known operands in a partial evaluation."""
    if Taps.sees_program():
        trace, primitive, values, params = args
        known = compat.known_ahead(trace, values)
        if known is not None:
            around = compat.set_current_trace(compat.parent_trace(trace))
            with around, settled(compat.AHEAD):
                return primitive.bind(*known, **primitive.get_bind_params(params))
    return original(*args, **kwargs)


class _Hoisting(threading.local):
    settled = False


_HOISTING = _Hoisting()


def _hoist(original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Remember whether operations are settled, which JAX forgets here."""
    before, _HOISTING.settled = _HOISTING.settled, is_settled()
    try:
        return original(*args, **kwargs)
    finally:
        _HOISTING.settled = before


def _trace_partially(original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    with settled() if _HOISTING.settled else contextlib.nullcontext():
        return original(*args, **kwargs)


def _transpose(original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    # What is transposed at once has no primitive that tells so, as a solve has.
    with settled(compat.TRANSPOSED) if Taps.is_observed() else contextlib.nullcontext():
        return original(*args, **kwargs)


def _linearize(original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    # Rules of JAX's own primitives run here, too, and are not shown to anybody.
    with settled(compat.LINEARIZED) if Taps.sees_program() else contextlib.nullcontext():
        return original(*args, **kwargs)


def _infer_shapes(original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    # Types may hold programs, whose like the program stages again.
    with Taps.unobserved(_only_stages):
        return original(*args, **kwargs)


def _only_stages(observer: Observer) -> bool:
    return isinstance(observer, Watcher) and observer.stages


PATCHES: tuple[Patch, ...] = (
    patch_calls(compat.jit_staging_rule, _stage_jitted),
    patch_calls(compat.evaluate_partially, _evaluate),
    patch_calls(compat.hoist, _hoist),
    patch_calls(compat.trace_partially, _trace_partially),
    patch_calls(jax.linear_transpose, _transpose),
    patch_calls(compat.linearize, _linearize),
    patch_calls(jax.eval_shape, _infer_shapes),
)
