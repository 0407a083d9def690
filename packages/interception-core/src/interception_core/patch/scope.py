"""Scopes: what is active on this thread, which is also what JAX's caches are keyed by.

The key of what is active is part of the key of every trace, lowering and compilation cache. A
tap fires if and only if the scope that is active has a handler for it, so a trace made under a
scope can never be found from outside of it, nor the other way round.
"""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Protocol

import jax

from .. import _compat
from ..interceptor import Handler, Interceptor
from .context import CONTEXT
from .patches import PatchSet
from .targets import Site

Counts = dict[tuple[str, str], int]


class Observer(Protocol):
    """Looks on while a program is staged.

    It is shown the primitives that meet a trace which doesn't stage them (grad, vmap, ...).
    """

    def bind(
        self, path: str, trace: Any, primitive: Any, values: Any, params: dict[str, Any]
    ) -> Any:
        """Returns a primitive's result in ``trace``, or NotImplemented to let it run.

        ``path`` is the module path, as far as the scope knows it.
        """

    def keeps(self, trace: Any) -> bool:
        """Returns whether ``trace`` keeps the calls of jitted functions that JAX would inline."""


class Activation:
    """One run of a wrapped function: its taps, its op counters and its inputs.

    The rules of a program keep the scope alive that it hangs on, so all that is large (the
    inputs) is dropped when the run ends, and traces are held weakly.
    """

    __slots__ = (
        "_base",
        "_counts",
        "_nested",
        "_origins",
        "disable_jit",
        "inputs",
        "interceptor",
        "key",
        "metadata",
        "observer",
        "patches",
        "resolve_path",
        "table",
    )

    def __init__(
        self,
        interceptor: Interceptor,
        table: Mapping[Site, tuple[str, Handler]],
        patches: PatchSet,
        disable_jit: bool,
        inputs: tuple[tuple, dict] | None,
        observer: Observer | None = None,
        shared_key: Hashable = None,
    ):
        self.interceptor = interceptor
        self.key = interceptor.cache_key if shared_key is None else shared_key
        self.resolve_path = interceptor.resolve_path if shared_key is None else _no_path
        self.observer = observer
        # By identity; the value is held, so that its id isn't given to another one.
        self.metadata: dict[int, tuple[Any, Mapping[str, Any]]] = {}
        self.table = table
        self.patches = patches
        self.disable_jit = disable_jit
        self.inputs = inputs
        self._origins: dict[int, str] | None = None
        base = _compat.staging_trace()
        self._base = None if base is None else weakref.ref(base)
        self._counts: Counts = {}
        self._nested: weakref.WeakKeyDictionary[Any, Counts] | None = None

    def number(self, path: str, op_name: str) -> tuple[int, str]:
        """Counts a call of ``op_name`` under module ``path``.

        Every trace below this run (a jitted function, a scan body) counts for itself: JAX may
        skip such a trace when it has it cached, and the numbers of the calls around it must not
        depend on that.

        Returns:
            How many there were before it, and the label of the trace that it is in, if any.
        """
        trace = _compat.staging_trace()
        if trace is None or (self._base is not None and self._base() is trace):
            counts, label = self._counts, ""
        else:
            if self._nested is None:
                self._nested = weakref.WeakKeyDictionary()
            counts, label = self._nested.setdefault(trace, {}), _compat.trace_label(trace)
        key = (path, op_name)
        number = counts.get(key, 0)
        counts[key] = number + 1
        return number, label

    def origins(self) -> dict[int, str]:
        """Returns the pytree path of every array among the inputs, by identity."""
        if self.inputs is None:
            raise RuntimeError(
                "OpCall.operands is known only while the wrapped function runs. Read it in the "
                "handler and keep the result."
            )
        if self._origins is None:
            args, kwargs = self.inputs
            inputs = {"args": args, "kwargs": kwargs}
            leaves, _ = jax.tree_util.tree_flatten_with_path(inputs)
            self._origins = {
                # A shared array keeps the first of its paths.
                id(leaf): path[0].key + jax.tree_util.keystr(path[1:])
                for path, leaf in reversed(leaves)
                if hasattr(leaf, "shape")
            }
        return self._origins

    def finish(self) -> None:
        """Lets go of the inputs."""
        self.inputs = self._origins = None
        self.metadata = {}


def _no_path(path: str) -> None:
    """Stands for every module path where traces are shared."""


class _Key:
    """Stands for a scope in JAX's caches, for as long as a scope or a cache has it."""

    __slots__ = ("__weakref__",)


_KEYS: weakref.WeakValueDictionary[tuple, _Key] = weakref.WeakValueDictionary()


class Scope:
    """One active interceptor and the scopes around it, innermost first.

    Its key stands for the interceptor's key, the resolved module path, the sites whose original
    it is running, whether it is asleep, and the scope outside: JAX hashes and compares it at
    every jitted call. A scope is asleep while JAX runs its own rules. It is observed if it, or
    one outside, has an observer.
    """

    key: _Key
    activation: Activation
    parent: Scope | None
    path: str
    within: frozenset[Site]
    asleep: bool
    observed: bool
    opener: Any = None
    restore: Any = None
    _other: Scope | None = None

    @classmethod
    def make(
        cls,
        activation: Activation,
        parent: Scope | None,
        path: str = "",
        within: frozenset[Site] = frozenset(),
        asleep: bool = False,
    ) -> Scope:
        """Returns the scope of ``activation`` inside ``parent``."""
        outer = None if parent is None else parent.key
        parts = (activation.key, activation.resolve_path(path), within, asleep, outer)
        key = _KEYS.get(parts)
        if key is None:
            key = _KEYS.setdefault(parts, _Key())
        scope = cls()
        scope.key = key
        scope.activation = activation
        scope.parent = parent
        scope.path = path
        scope.within = within
        scope.asleep = asleep
        scope.observed = activation.observer is not None or (parent is not None and parent.observed)
        return scope

    def rebased(self, parent: Scope | None) -> Scope:
        """Returns the same scope inside another one."""
        if parent is self.parent:
            return self
        return Scope.make(self.activation, parent, self.path, self.within)

    def inside(self, site: Site) -> Scope:
        """Returns the scope in which the original of ``site`` runs when no handler took it."""
        return Scope.make(self.activation, self.parent, self.path, self.within | {site})

    def extended(self, name: str) -> Scope:
        """Returns the scope with ``name`` appended to the module path, on every level."""
        parent = self.parent.extended(name) if self.parent is not None else None
        path = f"{self.path}/{name}" if self.path else name
        return Scope.make(self.activation, parent, path, self.within, self.asleep)

    def turned(self, asleep: bool) -> Scope:
        """Returns the scope asleep, or awake."""
        if asleep == self.asleep:
            return self
        if self._other is None:
            other = Scope.make(self.activation, self.parent, self.path, self.within, asleep)
            self._other, other._other = other, self
        return self._other

    def activations(self) -> Iterator[Activation]:
        """Yields what is active here and outside, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope.activation
            scope = scope.parent


class _Outside:
    """The state inside a handler of the outermost interceptor: nothing is tapped.

    It differs from no scope at all, so that lazily evaluated rules (``custom_vjp``) that were
    made there are known to belong there.
    """

    key = "jaxtap outside"


OUTSIDE = _Outside()

State = Scope | _Outside
"""A value of CONTEXT other than None."""


class Entered:
    """Context manager: makes a state current, with its patches installed."""

    __slots__ = ("_context", "_held", "_jit", "_state", "left")

    def __init__(self, state: State):
        self._state = state
        self._held: list[PatchSet] = []
        self._jit = None
        self.left: State = state

    def __enter__(self) -> Entered:
        try:
            disable_jit = False
            scope = self._state if isinstance(self._state, Scope) else None
            while scope is not None:
                scope.activation.patches.acquire()
                self._held.append(scope.activation.patches)
                disable_jit |= scope.activation.disable_jit
                scope = scope.parent
            disabled: bool = jax.config.jax_disable_jit  # pyrefly: ignore[missing-attribute]
            if disable_jit and not disabled:
                self._jit = jax.disable_jit()
                self._jit.__enter__()
            self._context = CONTEXT(self._state)
            self._context.__enter__()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *exc_info: Any) -> None:
        # A generator may be suspended inside a named scope: its next step resumes there.
        self.left = CONTEXT.value
        self._context.__exit__(*exc_info)
        self._release()

    def _release(self) -> None:
        try:
            if self._jit is not None:
                self._jit.__exit__(None, None, None)
                self._jit = None
        finally:
            while self._held:
                self._held.pop().release()
