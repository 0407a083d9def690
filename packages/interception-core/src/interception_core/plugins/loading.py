"""The declaration plane: imports a plugin module and collects its specs.

Each plugin is registered with a separate pluggy manager, so that it can't break, wrap or reorder
another plugin.
"""

import importlib
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NamedTuple

import pluggy

from ..errors import PluginError, nearest_name
from . import hookspecs as _hookspecs
from .discovery import Found
from .hookspecs import ALL_HOOKS, API_VERSION, HOOKS, PROJECT, SELECT
from .records import Phase, PluginRecord, Status
from .specs import Spec

_PREFIX = f"{PROJECT}_"

JAX_NOTE = (
    "Importing its plugin module, with the packages around it, must not import jax, and it does: "
    "every start of the command line gets slow. Import jax in the modules that "
    "'module:attribute' strings name."
)


class Loaded(NamedTuple):
    """A plugin's record and its declarations.

    Attributes:
        record: the record.
        specs: the declarations; none unless the record's status is ``"ok"``.
        select: the plugin's `jaxtap_select_kernel`, or None.
    """

    record: PluginRecord
    specs: tuple[Spec, ...] = ()
    select: Callable[..., Any] | None = None


def record_of(
    found: Found,
    status: Status,
    phase: Phase,
    error: BaseException | None = None,
    provides: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> PluginRecord:
    """Build the record of an installed plugin."""
    return PluginRecord(
        name=found.name,
        distribution=found.distribution,
        version=found.version,
        module=found.value,
        status=status,
        phase=phase,
        error=error,
        provides=tuple(provides),
        notes=tuple(notes),
    )


def load(found: Found, strict: bool = False) -> Loaded:
    """Load one plugin. Faults of the plugin do not raise.

    Args:
        found: the installed plugin.
        strict: whether importing jax is a failure and not a note.

    Returns:
        Its record and its specs.
    """
    # If jax is imported already, a plugin that imports it can't be found. If another thread imports
    # jax at this moment, the plugin is blamed, which is rare.
    had_jax = "jax" in sys.modules
    phase: Phase = "metadata"
    try:
        module_name = _module_name(found)
        phase = "import"
        module = importlib.import_module(module_name)
        phase = "api"
        _check_api(module)
        phase = "hooks"
        manager = _register(module, found.name)
        phase = "declare"
        specs = tuple(_declared(manager))
        select = _selector(manager)
        _check_repeats(specs)
        notes = [JAX_NOTE] if "jax" in sys.modules and not had_jax else []
        if notes and strict:
            phase = "import"
            raise PluginError(JAX_NOTE)
    except (Exception, SystemExit) as error:
        return Loaded(record_of(found, "failed", phase, error))
    provides = (f"{spec.kind}:{spec.key}" for spec in specs)
    return Loaded(record_of(found, "ok", phase, None, provides, notes), specs, select)


def _module_name(found: Found) -> str:
    if found.error is not None:
        raise found.error
    if not all(part.isidentifier() for part in found.value.split(".")):
        raise PluginError(
            f"The entry point {found.name!r} must name a plugin module, got {found.value!r}. "
            "Write for example 'acme_quant.plugin'."
        )
    return found.value


def _check_api(module: ModuleType) -> None:
    ours = ".".join(map(str, API_VERSION))
    api = getattr(module, "API", None)
    if api is None:
        raise PluginError(
            f"{module.__name__} must have the version of the plugin API that it is written for, "
            f"got none. Add `API = {API_VERSION}` to it."
        )
    if (
        not isinstance(api, tuple)
        or len(api) != 2
        or not all(isinstance(part, int) and not isinstance(part, bool) for part in api)
    ):
        raise PluginError(
            f"{module.__name__}.API must be a tuple of two ints, got {api!r}. Write for example "
            f"{API_VERSION}."
        )
    major, minor = api
    if major == API_VERSION[0] and minor <= API_VERSION[1]:
        return
    older = "interception-core" if api > API_VERSION else "the plugin"
    raise PluginError(
        f"{module.__name__} must be written for a plugin API that this interception-core offers, "
        f"{ours}, got {major}.{minor}. Upgrade {older}."
    )


def _register(module: ModuleType, name: str) -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(_hookspecs)
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
        unknown = sorted(hook for hook in vars(manager.hook) if hook not in ALL_HOOKS)
        raise PluginError(
            f"{module.__name__} must implement known hooks, got {', '.join(map(repr, unknown))}, "
            "which is not a hook."
            + "".join(map(_did_you_mean, unknown))
            + f" Hooks: {', '.join(ALL_HOOKS)}."
        ) from error
    return manager


def _did_you_mean(attribute: str) -> str:
    near = nearest_name(attribute, ALL_HOOKS)
    return f" Did you mean {near!r}?" if near not in (None, attribute) else ""


def _declared(manager: pluggy.PluginManager) -> Iterable[Spec]:
    for hook, wanted in HOOKS.items():
        caller: pluggy.HookCaller = getattr(manager.hook, hook)
        implementations = _implementations(caller, "Return a list.")
        # pluggy leaves out results that are None.
        results = caller()
        if len(results) != len(implementations):
            raise PluginError(
                f"{hook} must return a list of {wanted.__name__} objects, got None. Return an "
                "empty list if there is nothing to declare."
            )
        for result in results:
            yield from _checked(hook, wanted, result)


def _implementations(caller: pluggy.HookCaller, remedy: str) -> list[pluggy.HookImpl]:
    found = caller.get_hookimpls()
    if any(one.wrapper or one.hookwrapper for one in found):
        raise PluginError(
            f"{caller.name} must not be a wrapper, got one, and there is nothing to wrap. {remedy}"
        )
    return found


def _selector(manager: pluggy.PluginManager) -> Callable[..., Any] | None:
    caller: pluggy.HookCaller = getattr(manager.hook, SELECT)
    return caller if _implementations(caller, "Return a candidate or None.") else None


def _checked(hook: str, wanted: type[Spec], result: Any) -> Iterable[Spec]:
    if isinstance(result, Spec) or not isinstance(result, Iterable):
        raise PluginError(
            f"{hook} must return a list of {wanted.__name__} objects, got {result!r}. Return a "
            "list, also for one object."
        )
    for spec in result:
        if not isinstance(spec, wanted):
            raise PluginError(
                f"{hook} must return {wanted.__name__} objects, got {spec!r}. Declare other specs "
                "in their hook."
            )
        yield spec


def _check_repeats(specs: Iterable[Spec]) -> None:
    seen = set()
    for spec in specs:
        if (spec.kind, spec.key) in seen:
            raise PluginError(
                f"A plugin must declare each {spec.kind} once, got {spec.key!r} twice. Leave one "
                "out."
            )
        seen.add((spec.kind, spec.key))
