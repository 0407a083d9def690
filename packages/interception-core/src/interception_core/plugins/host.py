"""The plugin host: functions that programs call to get things by name.

The plugins are loaded once per process, when a program first asks. While a program is traced or
run, no hook is called except the one that chooses a kernel, once per different call.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ..errors import PluginError, PluginWarning, UnknownNameError
from .paths import resolve
from .records import PluginRecord, discover
from .registry import Claim, Registry, S, build, rivals
from .specs import (
    BridgeSpec,
    EngineSpec,
    ExportBackendSpec,
    FeatureSpec,
    FormSpec,
    ProviderSpec,
    QTypeSpec,
    Spec,
)

if TYPE_CHECKING:
    from ..engine import Engine

# What the factories of each kind return: by member, its meaning.
_MEMBERS: dict[type[Spec], dict[str, str]] = {
    ProviderSpec: {
        "engine": "the name of the engine that it runs on",
        "disable_jit": "whether that engine runs with jit off",
        "interceptor": "interceptor() -> Interceptor",
        "apply": "apply(fn) -> fn",
    },
    EngineSpec: {"wrap": "wrap(fn, interceptor) -> fn"},
    QTypeSpec: {
        "name": "the name of the format",
        "storage_dtype": "the dtype of quantized values",
        "scale_dtype": "the dtype of scales",
    },
    ExportBackendSpec: {
        "name": "the name that reports give it",
        "check": "check(rules) -> None",
        "quantize": "quantize(file) -> QuantizedFile",
    },
    BridgeSpec: {
        "parameters": "parameters(model) -> pytree of arrays",
        "function": "function(model, method) -> fn(parameters, *args, **kwargs)",
        "rebuild": "rebuild(model, parameters, quantized) -> model",
    },
}


class Host:
    """Loads the plugins once, from any thread."""

    def __init__(
        self,
        discover: Callable[[], Iterable[PluginRecord]],
        environ: Mapping[str, str] = os.environ,
    ):
        self._discover = discover
        self._environ = environ
        self._lock = threading.RLock()
        self._loading = False
        self._registry: Registry | None = None
        self._announced = False

    def registry(self) -> Registry:
        """Return the registry; the first call loads the plugins."""
        if self._registry is None:
            with self._lock:
                # The lock is re-entrant, so that a plugin gets this message and not a deadlock.
                if self._loading:
                    raise PluginError(
                        "A plugin must not ask for plugins while it is being loaded, got such a "
                        "request. Ask in a module that a 'module:attribute' string names."
                    )
                if self._registry is None:
                    self._loading = True
                    try:
                        self._registry = build(self._discover(), self._environ)
                    finally:
                        self._loading = False
        return self._registry

    def new_warnings(self) -> tuple[str, ...]:
        """Return the warnings at the first call, and none later."""
        registry = self.registry()
        with self._lock:
            announced, self._announced = self._announced, True
        return () if announced else registry.warnings


_host = Host(discover)


def reset(host: Host | None = None) -> None:
    """Forget the loaded plugins, for tests. Imported modules stay imported."""
    global _host
    _host = Host(discover) if host is None else host


def loaded() -> Registry:
    """Return the registry, even if `JAXTAP_STRICT_PLUGINS` would raise."""
    return _host.registry()


def new_warnings() -> tuple[str, ...]:
    """Return the warnings that this process has not given yet."""
    return _host.new_warnings()


def ready() -> Registry:
    """Return the registry, for functions that programs call.

    They call this directly, so that a warning about a plugin points at the program's line.

    Raises:
        PluginError: `JAXTAP_STRICT_PLUGINS` is set and a plugin is broken.
    """
    registry = _host.registry()
    registry.raise_if_strict()
    for line in _host.new_warnings():
        warnings.warn(line, PluginWarning, stacklevel=3)
    return registry


def plugins() -> tuple[PluginRecord, ...]:
    """Return a record of each installed plugin, sorted by name.

    Raises:
        PluginError: `JAXTAP_STRICT_PLUGINS` is set and a plugin is broken.
    """
    return ready().records


def declared_specs(kind: type[S]) -> tuple[S, ...]:
    """Return the declared specs of a kind that one plugin claims, by key.

    Args:
        kind: the class of the specs, such as `ProviderSpec`, `EngineSpec` or `KernelSpec`.

    Raises:
        PluginError: `JAXTAP_STRICT_PLUGINS` is set and a plugin is broken.
    """
    return tuple(claim.spec for claim in ready().of(kind))


def find_bridge(model: Any) -> Any:
    """Build the bridge for a model object.

    The model's classes are tried in the order in which Python looks up attributes. So the bridge of
    a framework that is built on another comes before the other's.

    Args:
        model: an object of some framework.

    Returns:
        The bridge: an object with `parameters(model)`, `function(model, method)` and
        `rebuild(model, parameters, quantized)`.

    Raises:
        UnknownNameError: no bridge is for such an object. The message lists the known ones, with
            what to install for them, and the plugins that failed.
        PluginError: bridges of several plugins are for the same class, the factory can't be
            imported, or its result is not a bridge.
    """
    registry = ready()
    claims = registry.of(BridgeSpec)
    for cls in type(model).__mro__:
        found = [claim for claim in claims if claim.spec.is_for(cls)]
        if len(found) > 1:
            raise rivals(found, f"{cls.__module__}.{cls.__qualname__}")
        if found:
            return _made(found[0], {})
    known = "; ".join(
        f"{spec.name!r} for {spec.model.replace(':', '.')}"
        + (f" ({spec.install})" if spec.install else "")
        for spec in (claim.spec for claim in claims)
    )
    cls = type(model)
    error = UnknownNameError(
        "The model must be of a class that a bridge is for, got a "
        f"{cls.__module__}.{cls.__qualname__}. There are: {known or 'none'}. Declare a bridge in a "
        f"plugin, with jaxtap_register_bridges. {registry.left_out}".rstrip()
    )
    error.kind, error.given = "bridge", f"{cls.__module__}.{cls.__qualname__}"
    error.known = tuple(claim.spec.name for claim in claims)
    raise error


def get_provider(name: str, /, **config: Any) -> Any:
    """Build a provider by name.

    Args:
        name: the name that a plugin declares it under.
        **config: options for the provider's factory.

    Returns:
        The provider: an object with `engine`, `disable_jit`, `interceptor()` and `apply(fn)`.

    Raises:
        UnknownNameError: no provider has that name. The message lists the known ones, and the
            plugins that failed.
        PluginError: two plugins claim the name, the plugin of that name failed, the factory can't
            be imported, or its result is not a provider.
    """
    return _made(ready().get(ProviderSpec, name), config)


def get_engine(name: str | None = None, /, **config: Any) -> Engine:
    """Build an engine.

    Args:
        name: the name that a plugin declares it under, such as ``"patch"``. None for the engine
            with the highest priority: "trace" if hijax-trace is installed.
        **config: options for the engine's factory.

    Returns:
        The engine: an object with `wrap(fn, interceptor)`.

    Raises:
        UnknownNameError, PluginError: as `get_provider`, of engines.
    """
    registry = ready()
    if name is None:
        engines = [claim.spec for claim in registry.of(EngineSpec)]
        name = max(engines, key=lambda spec: spec.priority).name if engines else "patch"
    return _made(registry.get(EngineSpec, name), config)


def get_export_backend(name: str, /, **config: Any) -> Any:
    """Build an export backend by name.

    Args:
        name: the name that a plugin declares it under, such as ``"aeq"``.
        **config: passed on to the backend's factory.

    Returns:
        The backend: an object with `name`, `check(rules)` and `quantize(file)`.

    Raises:
        UnknownNameError, PluginError: as `get_provider`, of export backends.
    """
    return _made(ready().get(ExportBackendSpec, name), config)


def get_feature(name: str) -> Callable[..., Any]:
    """Return the function of a feature that a plugin declares.

    Args:
        name: the name that a plugin declares it under, such as ``"plan-optimize"``.

    Raises:
        UnknownNameError, PluginError: as `get_provider`, of features.
    """
    claim = ready().get(FeatureSpec, name)
    return resolve(claim.spec.run, claim.label)


def get_form(kind: str) -> Any:
    """Return the class of a stored form that a plugin declares.

    Args:
        kind: the name that a plugin declares it under, and that files have for it.

    Returns:
        The class: a subclass of `quant_numerics.StoredForm`.

    Raises:
        UnknownNameError, PluginError: as `get_provider`, of stored forms.
        PluginError: the class has another kind.
    """
    claim = ready().get(FormSpec, kind)
    form = resolve(claim.spec.form, claim.label)
    if getattr(form, "kind", None) != kind:
        raise PluginError(
            f"{claim.label}: {claim.spec.form!r} must be a stored form of kind {kind!r}, got "
            f"{form!r}. Declare it as class {claim.spec.form.partition(':')[2]}("
            f"quant_numerics.StoredForm, kind={kind!r})."
        )
    return form


def make_qtype(name: str) -> Any:
    """Build a number format that a plugin declares, once.

    Args:
        name: the name that a plugin declares it under.

    Returns:
        The format: a `quant_numerics.QType`.

    Raises:
        UnknownNameError, PluginError: as `get_provider`, of formats.
        PluginError: the result has another name.
    """
    registry = ready()
    made = _qtypes.setdefault(registry, {})
    if name not in made:
        claim = registry.get(QTypeSpec, name)
        qtype = _made(claim, {})
        if qtype.name != name:
            raise PluginError(
                f"{claim.label}: {claim.spec.factory!r} must return a format called {name!r}, got "
                f"{qtype.name!r}. Give the spec and the format one name."
            )
        made[name] = qtype
    return made[name]


# Per registry, so that a test with other plugins makes its own.
_qtypes: weakref.WeakKeyDictionary[Registry, dict[str, Any]] = weakref.WeakKeyDictionary()


def _made(claim: Claim[Any], config: Mapping[str, Any]) -> Any:
    factory = claim.spec.factory
    # Exceptions of the factory, such as for an unknown option, are for the caller.
    made = resolve(factory, claim.label)(**config)
    members = _MEMBERS[type(claim.spec)].items()
    missing = [meaning for member, meaning in members if not hasattr(made, member)]
    if missing:
        raise PluginError(
            f"{claim.label}: the result of {factory!r} must have all members of a "
            f"{claim.spec.kind}, got {made!r}, which lacks: {'; '.join(missing)}. Define them."
        )
    return made
