"""The plugin host: what programs ask for by name.

The plugins are loaded once per process, when something is first asked for, and never again:
there is no hook call while a program is traced or run, but for the one that chooses a kernel,
once per different call.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import PluginError, PluginWarning, UnknownNameError
from .discovery import Found, discover
from .paths import resolve
from .records import PluginRecord
from .registry import Claim, Registry, build, rivals
from .specs import (
    BridgeSpec,
    EngineSpec,
    ExportBackendSpec,
    KernelSpec,
    ProviderSpec,
    QTypeSpec,
)

if TYPE_CHECKING:
    from ..engine import Engine

_PROVIDER_MEMBERS = {
    "engine": "the name of the engine that it runs on",
    "disable_jit": "whether that engine is to run with jit off",
    "interceptor": "interceptor() -> Interceptor",
    "apply": "apply(fn) -> fn",
}
_ENGINE_MEMBERS = {"wrap": "wrap(fn, interceptor) -> fn"}
_QTYPE_MEMBERS = {
    "name": "the name of the format",
    "storage_dtype": "the dtype of quantized values",
    "scale_dtype": "the dtype of scales",
}
_EXPORT_BACKEND_MEMBERS = {
    "name": "the name that reports give it",
    "check": "check(rules) -> None",
    "quantize": "quantize(file) -> QuantizedFile",
}
_BRIDGE_MEMBERS = {
    "parameters": "parameters(model) -> pytree of arrays",
    "function": "function(model, method) -> fn(parameters, *args, **kwargs)",
    "rebuild": "rebuild(model, parameters, quantized) -> model",
}


class Host:
    """Loads the plugins once, whichever thread comes first.

    Args:
        discover: returns the installed plugins.
        environ: where the environment variables are read from.
    """

    def __init__(
        self, discover: Callable[[], Iterable[Found]], environ: Mapping[str, str] = os.environ
    ):
        self._discover = discover
        self._environ = environ
        self._lock = threading.RLock()
        self._loading = False
        self._registry: Registry | None = None
        self._announced = False

    def registry(self) -> Registry:
        """Returns the registry, loading the plugins on the first call. Raises for none of them."""
        if self._registry is None:
            with self._lock:
                # The lock is re-entrant for the sake of this message.
                if self._loading:
                    raise PluginError(
                        "A plugin must not ask for plugins while it is being loaded: do it in "
                        "a module that a 'module:attribute' string names."
                    )
                if self._registry is None:
                    self._loading = True
                    try:
                        self._registry = build(self._discover(), self._environ)
                    finally:
                        self._loading = False
        return self._registry

    def new_warnings(self) -> tuple[str, ...]:
        """Returns the warnings on the first call in a process, and none later."""
        registry = self.registry()
        with self._lock:
            announced, self._announced = self._announced, True
        return () if announced else registry.warnings


_host = Host(discover)


def reset(host: Host | None = None) -> None:
    """Forget what was loaded. For tests alone: modules already imported stay imported."""
    global _host
    _host = Host(discover) if host is None else host


def loaded() -> Registry:
    """Returns the registry even where `JAXTAP_STRICT_PLUGINS` would raise: for diagnosis."""
    return _host.registry()


def new_warnings() -> tuple[str, ...]:
    """Returns the warnings not given yet in this process, for the command line to print."""
    return _host.new_warnings()


def ready() -> Registry:
    """Returns the registry, for functions that programs call.

    They call this directly: a warning about a plugin then points at the program's line.

    Raises:
        PluginError: `JAXTAP_STRICT_PLUGINS` is set and a plugin is broken.
    """
    registry = _host.registry()
    registry.raise_if_strict()
    for line in _host.new_warnings():
        warnings.warn(line, PluginWarning, stacklevel=3)
    return registry


def plugins() -> tuple[PluginRecord, ...]:
    """Returns what became of each installed plugin, sorted by name.

    Raises:
        PluginError: `JAXTAP_STRICT_PLUGINS` is set and a plugin is broken.
    """
    return ready().records


def providers() -> tuple[ProviderSpec, ...]:
    """Returns the declared providers, sorted by name, without those that two plugins claim.

    Raises:
        PluginError: `JAXTAP_STRICT_PLUGINS` is set and a plugin is broken.
    """
    return tuple(claim.spec for claim in ready().of(ProviderSpec))


def engines() -> tuple[EngineSpec, ...]:
    """Returns the declared engines, sorted by name, without those that two plugins claim.

    Raises:
        PluginError: `JAXTAP_STRICT_PLUGINS` is set and a plugin is broken.
    """
    return tuple(claim.spec for claim in ready().of(EngineSpec))


def kernels() -> tuple[KernelSpec, ...]:
    """Returns the declared kernels, sorted by target, without those that two plugins claim.

    Raises:
        PluginError: `JAXTAP_STRICT_PLUGINS` is set and a plugin is broken.
    """
    return tuple(claim.spec for claim in ready().of(KernelSpec))


def bridges() -> tuple[BridgeSpec, ...]:
    """Returns the declared bridges, sorted by name, without those that two plugins claim.

    Raises:
        PluginError: `JAXTAP_STRICT_PLUGINS` is set and a plugin is broken.
    """
    return tuple(claim.spec for claim in ready().of(BridgeSpec))


def qtypes() -> tuple[QTypeSpec, ...]:
    """Return the declared number formats, sorted by name, without those that two plugins claim.

    Raises:
        PluginError: `JAXTAP_STRICT_PLUGINS` is set and a plugin is broken.
    """
    return tuple(claim.spec for claim in ready().of(QTypeSpec))


def find_bridge(model: Any) -> Any:
    """Builds the bridge for a model object.

    The classes of the model are looked at in the order in which Python looks attributes up: the
    bridge of the nearest base decides, so one for a framework that is built on another goes
    before the other's.

    Args:
        model: an object of some framework.

    Returns:
        The bridge: an object with `parameters(model)`, `function(model, method)` and
        `rebuild(model, parameters, quantized)`.

    Raises:
        UnknownNameError: no bridge is for such an object. The known ones are listed, with what
            to install for them, and the plugins that failed, one of which might have had it.
        PluginError: bridges of several plugins are for the same class, the factory cannot be
            imported, or what it returns is not a bridge.
    """
    registry = ready()
    claims = registry.of(BridgeSpec)
    for cls in type(model).__mro__:
        found = [claim for claim in claims if claim.spec.is_for(cls)]
        if len(found) > 1:
            raise rivals(found, f"{cls.__module__}.{cls.__qualname__}")
        if found:
            return _made(found[0], {}, _BRIDGE_MEMBERS)
    known = "; ".join(
        f"{spec.name!r} for {spec.model.replace(':', '.')}"
        + (f" ({spec.install})" if spec.install else "")
        for spec in (claim.spec for claim in claims)
    )
    failed = [f"{one.label}, {one.reason}" for one in registry.broken if not one.provides]
    hint = f" Failed: {' '.join(failed)}" if failed else ""
    cls = type(model)
    error = UnknownNameError(
        f"No bridge is for a {cls.__module__}.{cls.__qualname__}. There are: {known or 'none'}. "
        f"A plugin can declare another with jaxtap_register_bridges.{hint}"
    )
    error.kind, error.given = "bridge", f"{cls.__module__}.{cls.__qualname__}"
    error.known = tuple(claim.spec.name for claim in claims)
    raise error


def get_provider(name: str, /, **config: Any) -> Any:
    """Builds a provider by name.

    Args:
        name: the name that a plugin declares it under.
        **config: passed on to the provider's factory.

    Returns:
        The provider: an object with `engine`, `disable_jit`, `interceptor()` and `apply(fn)`.

    Raises:
        UnknownNameError: no provider has that name; the known ones are listed, and the plugins
            that failed, one of which might have had it.
        PluginError: two plugins claim the name, the plugin of that name failed, the factory
            cannot be imported, or what it returns is not a provider.
    """
    return _made(ready().get(ProviderSpec, name), config, _PROVIDER_MEMBERS)


def get_engine(name: str | None = None, /, **config: Any) -> Engine:
    """Builds an engine.

    Args:
        name: the name that a plugin declares it under, such as ``"patch"``. Without one it is
            the engine of the highest priority: "trace" where hijax-trace is installed.
        **config: passed on to the engine's factory.

    Returns:
        The engine: an object with `wrap(fn, interceptor)`.

    Raises:
        UnknownNameError: no engine has that name; the known ones are listed, and the plugins
            that failed, one of which might have had it.
        PluginError: two plugins claim the name, the plugin of that name failed, the factory
            cannot be imported, or what it returns is not an engine.
    """
    registry = ready()
    if name is None:
        name = max(
            (claim.spec for claim in registry.of(EngineSpec)),
            key=lambda spec: spec.priority,
            default=_PATCH,
        ).name
    return _made(registry.get(EngineSpec, name), config, _ENGINE_MEMBERS)


def get_export_backend(name: str, /, **config: Any) -> Any:
    """Build an export backend by name.

    Args:
        name: the name that a plugin declares it under, such as ``"aeq"``.
        **config: passed on to the backend's factory.

    Returns:
        The backend: an object with `name`, `check(rules)` and `quantize(file)`.

    Raises:
        UnknownNameError: no export backend has that name; the known ones are listed, and the
            plugins that failed, one of which might have had it.
        PluginError: two plugins claim the name, the plugin of that name failed, the factory
            cannot be imported, or what it returns is not an export backend.
    """
    return _made(ready().get(ExportBackendSpec, name), config, _EXPORT_BACKEND_MEMBERS)


def make_qtype(name: str) -> Any:
    """Build a number format that a plugin declares, once.

    Args:
        name: the name that a plugin declares it under.

    Returns:
        The format: a `quant_numerics.QType`.

    Raises:
        UnknownNameError: no plugin has a format of that name; the known ones are listed, and the
            plugins that failed, one of which might have had it.
        PluginError: two plugins claim the name, the plugin of that name failed, the factory
            cannot be imported, or what it returns is not a format of that name.
    """
    registry = ready()
    made = _qtypes.setdefault(registry, {})
    if name not in made:
        claim = registry.get(QTypeSpec, name)
        qtype = _made(claim, {}, _QTYPE_MEMBERS)
        if qtype.name != name:
            raise PluginError(
                f"{claim.label}: {claim.spec.factory!r} must return a format called {name!r}, got "
                f"{qtype.name!r}. Give the spec and the format one name."
            )
        made[name] = qtype
    return made[name]


# Per registry, so that a test with other plugins makes its own.
_qtypes: weakref.WeakKeyDictionary[Registry, dict[str, Any]] = weakref.WeakKeyDictionary()


_PATCH = EngineSpec(
    "patch", "named where no engine is there at all", "interception_core:PatchEngine"
)


def _made(claim: Claim[Any], config: Mapping[str, Any], members: Mapping[str, str]) -> Any:
    factory = claim.spec.factory
    # Errors of the factory itself, such as an option that it does not have, are the caller's.
    made = resolve(factory, claim.label)(**config)
    missing = [meaning for member, meaning in members.items() if not hasattr(made, member)]
    if missing:
        raise PluginError(
            f"{claim.label}: {factory!r} returned {made!r}, which lacks: {'; '.join(missing)}."
        )
    return made
