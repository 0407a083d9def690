"""TraceEngine: taps a program by tracing it and re-interpreting the jaxpr."""

from __future__ import annotations

import functools
import inspect
import itertools
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, ParamSpec, TypeVar

import jax

from interception_core import Interceptor, TargetError, hide_frames, hides_frames
from interception_core.engine_api import Taps, check_wrapped
from interception_core.log import logger

from . import compat
from .dataflow.expression import Expression, Leaf
from .dataflow.flow import Origin, axes_inside
from .dataflow.holders import SAME
from .dataflow.nodes import Unknown
from .interpreter.early import Restage
from .interpreter.frames import Frame, Inputs
from .interpreter.lacking import reinterpret_without
from .interpreter.lazy import restored, type_of
from .interpreter.reinterpret import reinterpret
from .interpreter.session import BY_PATH, Session, Tapping
from .interpreter.watcher import PATCHES, Watcher
from .proxy.array_proxy import Apart, ArrayProxy, is_proxy, taken_apart
from .proxy.carrier import Carrier, without_replaced
from .staging.packed import Packed
from .state.carry import carry
from .state.stacks import stacked

_log = logger("trace")
hide_frames(Path(__file__).parent)

P = ParamSpec("P")
R = TypeVar("R")


class TraceEngine:
    """An engine that traces a function, and re-interprets the jaxpr with handlers.

    Handlers see functions and primitives under ``jit``, also in programs that were traced or
    compiled before: in nested jitted functions, the bodies of loops and branches, ``remat``,
    ``custom_jvp``, ``custom_vjp`` and ``shard_map``. They see an operation before the program
    differentiates or batches it. The result is an ordinary JAX function. Operations that no
    handler replaces stay as they were.

    Arguments may hold an ``ArrayProxy`` where the function expects an array.

    A program must be traceable, as for ``jax.jit``. Arrays among its arguments are traced. Python
    numbers, strings and other objects are constants.

    Args:
        disable_jit: an option of other engines, without effect here.

    Warns:
        UserWarning: ``disable_jit`` is true.
    """

    follows_values = True

    def __init__(self, *, disable_jit: bool = False):
        if disable_jit:
            warnings.warn(
                "TraceEngine taps under jit, and stages programs: disable_jit=True does nothing. "
                "Leave it out, or use PatchEngine(disable_jit=True).",
                stacklevel=2,
            )

    def wrap(self, fn: Callable[P, R], interceptor: Interceptor) -> Callable[P, R]:
        """Return ``fn`` with its operations tapped.

        The function is traced at each call. Functions that it calls are traced as often as JAX
        does that. The wrapper does nothing while the interceptor is active already.

        A handler is asked once for each operation. For an operation of a nested function it is
        asked again if the function is called with other types, or if something differs that the
        handler looked at, such as the module path or the origin of an operand.

        Args:
            fn: a callable, plain or jitted, whose result is a pytree.
            interceptor: the targets and their handlers. Targets are looked up at the first call,
                and again after a module was reloaded.

        Raises:
            TargetError: at once, for wrong types. At the call, for a target that is unknown, can't
                be tapped or is named twice, and for a handler whose result differs from the
                original's in structure, shapes or dtypes.
        """
        check_wrapped(self, fn, interceptor)
        if inspect.iscoroutinefunction(fn) or inspect.isasyncgenfunction(fn):
            raise TargetError(
                f"TraceEngine.wrap's function must not be asynchronous, got {fn!r}, which can't be "
                "traced. Wrap what it calls, or use PatchEngine."
            )
        tapped = _Tapped(self, fn, interceptor)

        # A plain function, so that it becomes a method as an attribute of a class.
        @hides_frames
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            return tapped.call(args, kwargs)

        return functools.update_wrapper(call, fn, updated=())


class _Tapped:
    """A wrapped function."""

    def __init__(self, engine: TraceEngine, fn: Callable[..., Any], interceptor: Interceptor):
        self._fn = fn
        self._interceptor = interceptor
        self._tapping: Tapping | None = None
        self._paths: tuple[Any, list[str]] | None = None
        self._rewrap = functools.partial(engine.wrap, interceptor=interceptor)

    def call(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Call the function with its operations tapped."""
        for outer in Taps.observers():
            if isinstance(outer, Watcher):
                outer.meet_tapped()
        tapping = self._current()
        if tapping.taps.holds():
            return self._fn(*args, **kwargs)
        packed, apart, lacking = restored(args, kwargs)
        held = {i: one.proxy for i, one in apart.items()}
        paths = self._paths_of(args, kwargs, packed.treedef)
        own = [paths[packed.leaf_of(i)] for i in range(len(packed.arrays))]
        replaced: frozenset[str] = frozenset()
        if any(one.inputs for one in held.values() if type(one) is Carrier):
            inputs = jax.tree.leaves((args, kwargs), is_leaf=is_proxy)
            held, replaced = without_replaced(held, dict(zip(paths, inputs, strict=True)))
            apart = {i: taken_apart(one) for i, one in held.items()}
        values = list(packed.arrays)
        avals = list(map(type_of, values))
        carried = _carried(packed, held)
        # JAX names inputs only if each leaf is one. Names take long to make.
        given = ((), {}) if apart else (args, kwargs)
        arguments = _arguments(own, avals)
        while True:
            watcher = Watcher(Session(tapping))
            staged = self._stage(watcher, given, packed, avals, apart, bool(carried), arguments)
            if staged is not None:
                break
            _log.debug("%r is traced again: handlers are asked in nested functions", self._fn)
            BY_PATH.add(self._interceptor)
            tapping = self._current()
        jaxpr, consts, result, leaves = staged
        _log.debug("%r is traced: %d equations", self._fn, len(jaxpr.eqns))
        session = watcher.session
        build: Callable[[Sequence[Any]], Any] = result.build
        # First the arrays of proxies that the program updates: loops that step along them may carry
        # a stack of them then.
        if carried:
            made = carry(jaxpr, consts, carried)
            jaxpr, consts = session.restaged(made)
            build = _chain(made.results, build)
            held = {i: proxy for i, proxy in held.items() if i not in carried}
        if session.tapping.carries_stacks and (made := stacked(jaxpr, consts)) is not None:
            jaxpr, consts = session.restaged(made)
        count = len(packed.arrays)
        first = len(jaxpr.invars) - len(leaves) - count
        avals += map(compat.typeof, leaves)
        inputs = _arguments(own, avals, first, held, apart)
        frame = Frame(jaxpr, inputs, "", consts=consts)
        values = [*consts, *values, *leaves]
        try:
            session.replaced = replaced
            if lacking:
                places = [len(consts) + i for i in lacking]
                return build(reinterpret_without(session, frame, jaxpr, values, places))
            return build(reinterpret(session, frame, jaxpr, values))
        finally:
            session.finish()

    def _current(self) -> Tapping:
        by_path, tapping = self._interceptor in BY_PATH, self._tapping
        # Its tables are of objects: a name may be that of another one by now, as after a reload.
        is_known = tapping is not None and tapping.by_path == by_path and tapping.taps.is_current()
        if tapping is None or not is_known:
            tapping = self._tapping = Tapping(
                self._interceptor,
                self._rewrap,
                by_path,
                lambda tapping: Watcher(Session(tapping)),
                reinterpret,
                PATCHES,
            )
        return tapping

    def _paths_of(self, args: tuple, kwargs: dict[str, Any], treedef: Any) -> list[str]:
        """Return the pytree paths of the arguments' leaves, which equal calls share."""
        known = self._paths
        if known is None or known[0] != treedef:
            # From the arguments themselves: a user's class may take nothing but arrays.
            found, _ = jax.tree_util.tree_flatten_with_path(
                {"args": args, "kwargs": kwargs}, is_leaf=is_proxy
            )
            paths = [path[0].key + jax.tree_util.keystr(path[1:]) for path, _ in found]
            known = self._paths = treedef, paths
        return known[1]

    def _whole(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function, all of which must run while it is staged."""
        value = self._fn(*args, **kwargs)
        if inspect.isgenerator(value) or inspect.iscoroutine(value) or inspect.isasyncgen(value):
            if hasattr(value, "close"):
                value.close()
            raise TargetError(
                f"{self._fn!r} must return a pytree, got a {type(value).__name__}, which can't be "
                "traced. Wrap what it calls, or use PatchEngine."
            )
        return value

    def _stage(
        self,
        watcher: Watcher,
        given: tuple[tuple, dict[str, Any]],
        packed: Packed,
        avals: Sequence[Any],
        apart: Mapping[int, Apart],
        is_carried: bool,
        arguments: Inputs,
    ) -> tuple[Any, list[Any], Packed, list[Any]] | None:
        """Stage the function of values.

        Returns:
            The jaxpr, the values of its constants, the result, and the arrays of proxies which are
            its last inputs: all, or none where nothing asked for a proxy. None if it must be
            ``BY_PATH``.
        """
        result: Packed | None = None
        leaves: list[Any] = []
        watcher.session.origin = arguments.origin
        taps = watcher.session.tapping.taps

        def flat(*tracers: Any) -> list[Any]:
            nonlocal result
            trace = compat.current_trace()

            # Few programs ask, and a program may have hundreds of weights.
            @functools.cache
            def held() -> Mapping[int, ArrayProxy]:
                leaves[:] = [leaf for one in apart.values() for leaf in one.leaves]
                return _built(apart, compat.more_inputs(trace, map(compat.typeof, leaves)))

            watcher.early.tracers.begin(trace, tracers, arguments, held)
            if is_carried:  # `carry` changes these inputs
                held()
            watcher.defer_inlining(trace)
            args, kwargs = packed.build(tracers)
            result = Packed(taps.run(self._whole, args, kwargs, observer=watcher))
            return result.forget()

        info = compat.debug_info("tap", self._fn, *given)
        try:
            staged = compat.stage(flat, avals, info)
        except Restage as end:
            if end.early is not watcher.early:
                raise
            return None
        finally:
            watcher.early.tracers.end()
        assert result is not None
        return None if watcher.early.needs_restage else (*staged, result, leaves)


def _built(apart: Mapping[int, Apart], leaves: Sequence[Any]) -> dict[int, ArrayProxy]:
    """Return array proxies of other arrays, which are all of theirs, one after the other."""
    found, rest = {}, iter(leaves)
    for i, (_, own, (structure, _)) in apart.items():
        found[i] = jax.tree.unflatten(structure, itertools.islice(rest, len(own)))
    return found


def _carried(packed: Packed, held: Mapping[int, ArrayProxy]) -> dict[int, tuple[Any, int]]:
    """Return structure and first array's number of carried proxies."""
    found, first = {}, len(packed.arrays)
    if True not in [proxy.is_carried for proxy in held.values()]:
        return {}
    for i, proxy in held.items():
        structure = jax.tree.structure(proxy)
        if proxy.is_carried:
            found[i] = structure, first
        first += structure.num_leaves
    return found


def _chain(first: Callable[..., Any], second: Callable[..., Any]) -> Callable[..., Any]:
    return lambda values: second(first(values))


def _arguments(
    paths: Sequence[str],
    avals: Sequence[Any],
    first: int = 0,
    held: Mapping[int, ArrayProxy] = MappingProxyType({}),
    apart: Mapping[int, Apart] = MappingProxyType({}),
) -> Inputs:
    """Return what is known of the inputs of a program: arguments, then the arrays of proxies.

    Args:
        paths: the pytree path of each argument.
        avals: the types of all inputs. The values are not kept: rules of the program may run long
            after its call.
        first: how many inputs come before. Since 0.11 constants without values do.
        held: the array proxies of arguments, by number.
        apart: the same, taken apart; some may be others now.
    """

    def origin(index: int) -> Origin | None:
        number = index - first
        if not 0 <= number < len(paths):
            return None
        return Origin(paths[number], axes_inside(SAME, avals[number]))

    def expression(index: int) -> Expression:
        found, number = origin(index), index - first
        if found is None:
            return Unknown(avals[number], "a part of an array proxy", None)
        return Leaf(avals[number], number, found.path)

    proxies = {first + i: proxy for i, proxy in held.items()}
    known = {first + i: one for i, one in apart.items()}
    return Inputs((), origin, expression, proxies=proxies, apart=known)
