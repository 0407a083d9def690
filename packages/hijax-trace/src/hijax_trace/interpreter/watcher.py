"""The watcher: what happens at tapped calls while a program is staged."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax

from interception_core.engine_api import Observer, Patch, Taps, is_settled, patch_calls, settled

from .. import compat
from ..dataflow.holders import custom_body
from ..staging.deferred import Staged, can_defer, defer, defers, staged
from ..staging.marker import hoisted, key_of
from ..staging.packed import Packed, is_iterator, is_plain, stage_packed
from ..staging.repeated import appended, appended_call, context_token
from .early import Early
from .session import Session


class Watcher:
    """Observes tapped calls while a program is staged, and stages markers.

    It implements ``interception_core.engine_api.Observer``; ``PATCHES`` ask it, too.

    Attributes:
        early: asks handlers that can't wait.
    """

    def __init__(self, session: Session):
        self.session = session
        self.early = Early(session)
        self._deferring: weakref.WeakSet[Any] = weakref.WeakSet()

    def again(self, site: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Stage a function's call as an equal one before was staged.

        Returns:
            The call's result, or NotImplemented if there was none.
        """
        return self.session.tapping.markers.again(site, args, kwargs)

    def on_call(
        self, handler: Callable[..., Any], call: Any, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Stage a marker for a function's call, or ask its handler early.

        ``Taps`` calls this instead of the handler, in the scope of the call.

        Returns:
            The call's result, or NotImplemented to let the function run.
        """
        context = context_token()
        with call.outside():
            return self._outside(context, handler, call, args, kwargs)

    def _outside(
        self,
        context: Hashable,
        handler: Callable[..., Any],
        call: Any,
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Do the same where this interceptor does not act."""
        if is_plain(args, kwargs):
            trace = compat.current_trace()
            if compat.is_staging(trace):
                return self._stage(context, call, args, kwargs)
            packed = Packed((args, kwargs), ())
            known = compat.known_ahead(trace, packed.arrays)
            if known is not None:
                # The operation depends on known values alone, so it belongs to the trace around.
                args, kwargs = packed.build(known)
                with compat.set_current_trace(compat.parent_trace(trace)), settled(compat.AHEAD):
                    return self._outside(context, handler, call, args, kwargs)
            if any(map(compat.unknown_ahead, packed.arrays)):
                return NotImplemented
            if defers(trace, self.early.tracers.base()):
                found = self._staged(context, call, packed)
                if can_defer(found, trace):
                    return found.results.build(defer(found, packed.arrays))
        leaves = jax.tree.leaves((args, kwargs), is_leaf=is_iterator)
        # JAX transposes what is made of a tangent, so that a handler can't be asked early.
        if any(compat.unknown_ahead(leaf) or compat.is_tangent(leaf) for leaf in leaves):
            return NotImplemented
        return self.early.call(handler, call, args, kwargs, leaves)

    def _stage(self, context: Hashable, call: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        def body(*args: Any, **kwargs: Any) -> Any:
            self.defer_inlining(compat.current_trace())
            return call.let_run(*args, **kwargs)

        return self.session.tapping.markers.stage(context, call, body, args, kwargs)

    def _staged(self, context: Hashable, call: Any, packed: Packed) -> Staged:
        """Stage a function's call as a separate jaxpr."""
        values = packed.arrays
        key = key_of(call.site, call.site.subject, packed)
        found = None if key is None else self.session.tapping.mapped.get(key)
        if found is None:

            def run(arrays: Sequence[Any]) -> Any:
                args, kwargs = packed.build(arrays)
                return self._stage(context, call, args, kwargs)

            types = list(map(compat.typeof, values))
            jaxpr, consts, results = stage_packed(call.op_name, run, types)
            found = Staged(*hoisted(jaxpr, consts), results)
            if key is not None and not found.more:
                self.session.tapping.mapped[key] = found
        return found

    def defer_inlining(self, trace: Any) -> None:
        """Let a trace keep jitted calls that JAX would inline.

        They are inlined when the program is re-interpreted. Until then each is one equation that
        JAX has traced before, and whose derivative it makes once for all such calls.
        """
        self._deferring.add(trace)

    def defers_inlining(self, trace: Any) -> bool:
        """Return whether a trace keeps such calls."""
        return trace in self._deferring

    def call(
        self, function: Any, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """Call a function with custom rules, once for equal calls of a trace."""
        # Handlers that are asked early see each call.
        if type(function) is jax.custom_jvp and not self.session.tapping.by_path:
            packed = Packed((args, kwargs), ())
            key = key_of(function, function.fun, packed)
            if key is not None:
                return appended(key, lambda: call(*args, **kwargs), packed.arrays)
        return call(*args, **kwargs)

    def bind(
        self, path: str, trace: Any, primitive: Any, values: Any, params: dict[str, Any]
    ) -> Any:
        """Stage a primitive that meets a transformation, or ask its handlers early.

        Returns:
            Its results, or NotImplemented to let JAX bind it.
        """
        if primitive is compat.deferred_p:
            return NotImplemented
        values = list(values)
        if not self.session.tapping.tasks.wants_call(primitive, params, len(values)):
            return NotImplemented
        if any(map(compat.unknown_ahead, values)):
            return NotImplemented
        if compat.is_derivative(trace) and custom_body(primitive, params, len(values)) is not None:
            return NotImplemented  # its rule runs now, a part of the program
        if not defers(trace, self.early.tracers.base()):
            if any(map(compat.is_tangent, values)):
                return NotImplemented
            return self.early.bind(path, trace, primitive, values, params)

        def again(*values: Any) -> Any:
            found = primitive.bind(*values, **primitive.get_bind_params(params))
            return found if primitive.multiple_results else [found]

        with compat.set_current_trace(trace):
            call = staged(primitive.name, again, values)
            if not can_defer(call, trace):
                if any(map(compat.is_tangent, values)):
                    return NotImplemented
                return self.early.bind(path, trace, primitive, values, params)
            results = defer(call, values)
        return results if primitive.multiple_results else results[0]

    def meet_tapped(self) -> None:
        """Require separate traces: the program calls a function that is wrapped itself.

        The interceptor decides whether that function's operations are tapped twice, so traces
        can't be shared between interceptors.
        """
        if not self.session.tapping.by_path:
            self.early.restage()


def _stage_jitted(original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    # JAX's rules keep such calls, too: the derivative of what they leave sums in the calls' order.
    for observer in Taps.observers():
        if isinstance(observer, Watcher) and observer.defers_inlining(args[0]):
            trace, source, *operands = args
            return appended_call(trace, source, operands, kwargs)
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
    # Rules of JAX's own primitives run here, too, and are not shown to anyone.
    with settled(compat.LINEARIZED) if Taps.sees_program() else contextlib.nullcontext():
        return original(*args, **kwargs)


def _infer_shapes(original: Callable, args: tuple, kwargs: dict[str, Any]) -> Any:
    # Types may hold programs, whose like the program stages again.
    with Taps.unobserved(_only_stages):
        return original(*args, **kwargs)


def _only_stages(observer: Observer) -> bool:
    """Return whether an observer asks no handler in traces of nested functions."""
    return isinstance(observer, Watcher) and not observer.session.tapping.by_path


PATCHES: tuple[Patch, ...] = (
    patch_calls(compat.jit_staging_rule, _stage_jitted),
    patch_calls(compat.evaluate_partially, _evaluate),
    patch_calls(compat.hoist, _hoist),
    patch_calls(compat.trace_partially, _trace_partially),
    patch_calls(jax.linear_transpose, _transpose),
    patch_calls(compat.linearize, _linearize),
    patch_calls(jax.eval_shape, _infer_shapes),
)
