"""The declaration plane: imports a plugin module and collects its specs.

All plugins are registered with one pluggy manager, each under its name. An implementation of a hook
is called alone and not through the hook: in a call of the hook, one that raises would take the
results of all others with it.
"""

import importlib
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from types import ModuleType
from typing import Any

import pluggy

from ..errors import PluginError, nearest_name
from .hookspecs import ALL_HOOKS, API_VERSION, HOOKS, HOOKSPECS, PROJECT
from .records import Phase, PluginRecord
from .specs import Spec, is_version

_PREFIX = f"{PROJECT}_"

JAX_NOTE = (
    "Importing its plugin module, with the packages around it, must not import jax, and it does: "
    "every start of the command line gets slow. Import jax in the modules that "
    "'module:attribute' strings name."
)


def new_manager() -> pluggy.PluginManager:
    """Return a manager that knows jaxtap's hooks and no plugin."""
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(HOOKSPECS)
    return manager


def implementations(manager: pluggy.PluginManager, hook: str, plugin: str) -> list[pluggy.HookImpl]:
    """Return a plugin's implementations of a hook: one, as a rule, or none."""
    caller: pluggy.HookCaller = getattr(manager.hook, hook)
    return [one for one in caller.get_hookimpls() if one.plugin_name == plugin]


def load(manager: pluggy.PluginManager, found: PluginRecord, strict: bool = False) -> PluginRecord:
    """Load one plugin. Faults of the plugin do not raise."""
    # If jax is imported already, a plugin that imports it can't be found. If another thread imports
    # jax at this moment, the plugin is blamed, which is rare.
    had_jax = "jax" in sys.modules
    phase: Phase = "metadata"
    try:
        _check_entry(found)
        phase = "import"
        module = importlib.import_module(found.module)
        phase = "api"
        _check_api(module)
        phase = "hooks"
        _register(manager, module, found.name)
        phase = "declare"
        specs = tuple(_declared(manager, found.name))
        _check_repeats(specs)
        notes = (JAX_NOTE,) if "jax" in sys.modules and not had_jax else ()
        if notes and strict:
            phase = "import"
            raise PluginError(JAX_NOTE)
    except (Exception, SystemExit) as error:
        if manager.has_plugin(found.name):
            manager.unregister(name=found.name)
        return replace(found, status="failed", phase=phase, error=error)
    return replace(found, phase=phase, specs=specs, notes=notes)


def _check_entry(found: PluginRecord) -> None:
    if found.error is not None:
        raise found.error
    if not all(part.isidentifier() for part in found.module.split(".")):
        raise PluginError(
            f"The entry point {found.name!r} must name a plugin module, got {found.module!r}. "
            "Write for example 'acme_quant.plugin'."
        )


def _check_api(module: ModuleType) -> None:
    ours = ".".join(map(str, API_VERSION))
    api = getattr(module, "API", None)
    if not is_version(api):
        raise PluginError(
            f"{module.__name__}.API must be the version of the plugin API that it is written for, "
            f"a tuple of two ints, got {api!r}. Add `API = {API_VERSION}` to it."
        )
    major, minor = api
    if major == API_VERSION[0] and minor <= API_VERSION[1]:
        return
    older = "interception-core" if api > API_VERSION else "the plugin"
    raise PluginError(
        f"{module.__name__} must be written for a plugin API that this interception-core offers, "
        f"{ours}, got {major}.{minor}. Upgrade {older}."
    )


def _register(manager: pluggy.PluginManager, module: ModuleType, name: str) -> None:
    other = manager.get_name(module)
    if other is not None:
        raise PluginError(
            f"A module must be that of one plugin, got {module.__name__}, which the plugin "
            f"{other!r} is, too. Leave out one of the entry points {other!r} and {name!r}."
        )
    for attribute, value in vars(module).items():
        if (
            attribute.startswith(_PREFIX)
            and callable(value)
            and manager.parse_hookimpl_opts(module, attribute) is None
        ):
            raise PluginError(
                f"A function called {_PREFIX}* must be a hook, got {module.__name__}.{attribute}, "
                "which is not marked as one. Put `@hookimpl` above it, or rename it."
                + _did_you_mean(attribute)
            )
    try:
        manager.register(module, name)
    except pluggy.PluginValidationError as error:
        raise PluginError(" ".join(str(error).split())) from error
    try:
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        callers = manager.get_hookcallers(module) or ()
        unknown = sorted(caller.name for caller in callers if not caller.has_spec())
        raise PluginError(
            f"{module.__name__} must implement known hooks, got {', '.join(map(repr, unknown))}, "
            "which is not a hook."
            + "".join(map(_did_you_mean, unknown))
            + f" Hooks: {', '.join(ALL_HOOKS)}."
        ) from error


def _did_you_mean(attribute: str) -> str:
    near = nearest_name(attribute, ALL_HOOKS)
    return f" Did you mean {near!r}?" if near not in (None, attribute) else ""


def _declared(manager: pluggy.PluginManager, plugin: str) -> Iterator[Spec]:
    for hook in ALL_HOOKS:
        for one in implementations(manager, hook, plugin):
            if one.wrapper or one.hookwrapper:
                raise PluginError(
                    f"{hook} must not be a wrapper, got one, and there is nothing to wrap. Put "
                    "`@hookimpl` without options above it."
                )
            if hook in HOOKS:
                yield from _checked(hook, HOOKS[hook], one.function())


def _checked(hook: str, wanted: type[Spec], result: Any) -> Iterator[Spec]:
    if isinstance(result, Spec) or not isinstance(result, Iterable):
        raise PluginError(
            f"{hook} must return a list of {wanted.__name__} objects, got {result!r}. Return a "
            "list, also for one object or none."
        )
    for spec in result:
        if not isinstance(spec, wanted):
            raise PluginError(
                f"{hook} must return {wanted.__name__} objects, got {spec!r}. Declare other specs "
                "in their hook."
            )
        yield spec


def _check_repeats(specs: Iterable[Spec]) -> None:
    for (kind, key), count in Counter((spec.kind, spec.key) for spec in specs).items():
        if count > 1:
            raise PluginError(
                f"A plugin must declare each {kind} once, got {key!r} twice. Leave one out."
            )
