"""Scopes: the active interceptors of a thread, a key of JAX's caches.

The key of the active scope is a part of the key of every trace, lowering and compilation cache. A
tap acts if and only if the active scope has a handler for it. So traces made in a scope are never
reused outside of it, and vice versa.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import InitVar, dataclass, field, replace
from typing import Any, Protocol

import jax

from .. import _compat
from ..interceptor import Handler, Interceptor
from .context import CONTEXT
from .patches import PatchSet
from .targets import Site

Counts = dict[tuple[str, str], int]


class Observer(Protocol):
    """Observes a program while it is staged.

    It is shown the primitives that meet a transformation such as ``grad`` or ``vmap``, and makes
    the calls of functions with custom rules.
    """

    def bind(
        self, path: str, trace: Any, primitive: Any, values: Any, params: dict[str, Any]
    ) -> Any:
        """Return a primitive's results, or NotImplemented to let it run.

        Args:
            path: the module path, as far as the scope knows it.
            trace: the trace that the primitive is bound in.
            primitive: the primitive.
            values: its operands.
            params: its parameters.
        """

    def call(
        self,
        function: Any,
        call: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
    ) -> Any:
        """Return the result of ``call(*args, **kwargs)``, if no other interceptor is active.

        Args:
            function: a ``custom_jvp``, ``custom_vjp`` or ``custom_vmap`` that is not a target.
            call: calls it.
            args: the positional arguments.
            kwargs: the keyword arguments.
        """


@dataclass(slots=True, eq=False)
class Activation:
    """One run of a wrapped function: its taps, counters and inputs.

    Custom derivative rules keep a scope, and with it this object, alive. So the inputs are dropped
    when the run ends, and traces are held weakly.
    """

    interceptor: Interceptor
    table: Mapping[Site, tuple[str, Handler]]
    patches: PatchSet
    disable_jit: bool
    inputs: tuple[tuple, dict] | None
    observer: Observer | None = None
    shared_key: InitVar[Hashable] = None
    on_call: Callable[..., Any] | None = None
    again: Callable[..., Any] | None = None
    key: Hashable = field(init=False)
    resolve_path: Callable[[str], Hashable] = field(init=False)
    # By id. The value is kept with its metadata, so that its id isn't given to another one.
    metadata: dict[int, tuple[Any, Mapping[str, Any]]] = field(default_factory=dict, init=False)
    _origins: dict[int, str] | None = field(default=None, init=False)
    _base: weakref.ref[Any] | None = field(default=None, init=False)
    _counts: Counts = field(default_factory=dict, init=False)
    _nested: weakref.WeakKeyDictionary[Any, Counts] | None = field(default=None, init=False)

    def __post_init__(self, shared_key: Hashable) -> None:
        interceptor, base = self.interceptor, _compat.staging_trace()
        self.key = interceptor.cache_key if shared_key is None else shared_key
        self.resolve_path = interceptor.resolve_path if shared_key is None else _no_path
        self._base = None if base is None else weakref.ref(base)

    def number(self, path: str, op_name: str) -> tuple[int, str]:
        """Count a call under a module path.

        Nested traces (a jitted function, the body of a scan) are counted separately. JAX skips a
        trace that it has cached, and the numbers of calls around it must not depend on that.

        Returns:
            How many such calls there were before, and the label of the nested trace, or "".
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
        """Return the pytree path of every array among the inputs, by ``id``.

        Raises:
            RuntimeError: the run has ended.
        """
        if self.inputs is None:
            raise RuntimeError(
                "OpCall.operands must be read while the wrapped function runs, got a call that "
                "has ended. Read it in the handler and keep the result."
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
        """Drop the inputs."""
        self.inputs = self._origins = None
        self.metadata = {}


def _no_path(path: str) -> None:
    """Return one key for all module paths, so that traces are shared."""


class _Key:
    """A scope's key in JAX's caches."""

    __slots__ = ("__weakref__",)


_KEYS: weakref.WeakValueDictionary[tuple, _Key] = weakref.WeakValueDictionary()


@dataclass(eq=False)
class Scope:
    """One active interceptor and the scopes around it, innermost first.

    Attributes:
        activation: the run of the wrapped function.
        parent: the scope outside, or None.
        path: the module path.
        within: the sites whose original is running because a handler let it.
        asleep: whether JAX is running its rules, whose operations are not the program's.
        linear: whether JAX is tracing a function to transpose it.
        key: an object that is the same for scopes with equal interceptor keys, module path keys,
            ``within``, ``asleep``, ``linear`` and outer scopes. JAX hashes and compares it at every
            jitted call, so it is compared by identity.
        observed: whether it or a scope outside has an observer.
        opener: the name scope that opened it.
        restore: the context manager that the opener leaves.
    """

    activation: Activation
    parent: Scope | None
    path: str = ""
    within: frozenset[Site] = frozenset()
    asleep: bool = False
    linear: bool = False
    key: _Key = field(init=False)
    observed: bool = field(init=False)
    opener: Any = field(default=None, init=False)
    restore: Any = field(default=None, init=False)
    _other: Scope | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        activation, parent = self.activation, self.parent
        outer, path = None if parent is None else parent.key, activation.resolve_path(self.path)
        parts = (activation.key, path, self.within, self.asleep, self.linear, outer)
        self.key = _KEYS.get(parts) or _KEYS.setdefault(parts, _Key())
        self.observed = activation.observer is not None or (parent is not None and parent.observed)

    def rebased(self, parent: Scope | None) -> Scope:
        """Return the same scope inside another one."""
        if parent is self.parent:
            return self
        return replace(self, parent=parent, asleep=False)

    def inside(self, site: Site) -> Scope:
        """Return the scope for the original that a handler left."""
        return replace(self, within=self.within | {site}, asleep=False)

    def extended(self, name: str) -> Scope:
        """Return the scope with a longer module path, on every level."""
        parent = self.parent.extended(name) if self.parent is not None else None
        path = f"{self.path}/{name}" if self.path else name
        # Not `replace`, which goes through all fields: programs open a scope for each layer.
        return Scope(self.activation, parent, path, self.within, self.asleep, self.linear)

    def transposed(self) -> Scope:
        """Return the scope in which JAX traces a function to transpose it, on every level."""
        parent = self.parent.transposed() if self.parent is not None else None
        return replace(self, parent=parent, linear=True)

    def turned(self, asleep: bool) -> Scope:
        """Return the scope, asleep or awake."""
        if asleep == self.asleep:
            return self
        if self._other is None:
            other = replace(self, asleep=asleep)
            self._other, other._other = other, self
        return self._other

    def activations(self) -> Iterator[Activation]:
        """Yield the activations of this scope and those outside, innermost first."""
        scope: Scope | None = self
        while scope is not None:
            yield scope.activation
            scope = scope.parent


class _Outside:
    """The state inside the outermost handler, where nothing is tapped.

    It differs from no state, so that custom rules that were made there are run untapped later.
    """

    key = "jaxtap outside"


OUTSIDE = _Outside()

State = Scope | _Outside
"""A value of CONTEXT other than None."""


class Entered:
    """Context manager that makes a state current and installs its patches."""

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
        # A generator may be suspended inside a name scope. Its next step resumes there.
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
