"""The declaration plane: imports one plugin module and takes down what it declares.

Each plugin is registered with a pluggy manager of its own. Whatever it does, in its module or
in its hooks, is then between it and the host: it cannot break, wrap or reorder another plugin.
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
    "Importing its plugin module (with the packages around it) imports jax, which makes every "
    "start of the command line slow. Import jax in the modules that 'module:attribute' strings "
    "name instead."
)


class Loaded(NamedTuple):
    """A plugin's record and what it declares (nothing, unless its status is ``"ok"``).

    `select` is its `jaxtap_select_kernel`, or None where it has none.
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
    """Builds the record of an installed plugin."""
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
    """Loads one plugin. Never raises for what the plugin does wrong.

    Args:
        found: the installed plugin.
        strict: whether importing jax is a failure rather than a note.

    Returns:
        Its record and its specs.
    """
    # Where jax is there already, what the plugin itself imports cannot be told. In the rare
    # case that another thread imports it meanwhile, the plugin is blamed for it.
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
            f"The entry point {found.name!r} must name a plugin module, such as "
            f"'acme_quant.plugin', got {found.value!r}."
        )
    return found.value


def _check_api(module: ModuleType) -> None:
    ours = ".".join(map(str, API_VERSION))
    api = getattr(module, "API", None)
    if api is None:
        raise PluginError(
            f"{module.__name__} does not say which plugin API it is written for: "
            f"add `API = {API_VERSION}` to it."
        )
    if (
        not isinstance(api, tuple)
        or len(api) != 2
        or not all(isinstance(part, int) and not isinstance(part, bool) for part in api)
    ):
        raise PluginError(
            f"{module.__name__}.API must be a tuple of two ints, such as {API_VERSION}, "
            f"got {api!r}."
        )
    major, minor = api
    if major == API_VERSION[0] and minor <= API_VERSION[1]:
        return
    # Whichever of the two is older has to move.
    remedy = "interception-core" if api > API_VERSION else "the plugin"
    raise PluginError(
        f"{module.__name__} is written for plugin API {major}.{minor}, and this "
        f"interception-core offers {ours}: upgrade {remedy}."
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
                f"{module.__name__}.{attribute} is not marked as a hook: put `@hookimpl` above "
                f"it. Where it is not meant as one, rename it: {_PREFIX}* names are for hooks."
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
            f"{module.__name__} implements {', '.join(map(repr, unknown))}, which is not a hook."
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
        # pluggy leaves out the results that are None.
        results = caller()
        if len(results) != len(implementations):
            raise PluginError(
                f"{hook} returned None: return a list of {wanted.__name__} objects, "
                "an empty one where there is nothing to declare."
            )
        for result in results:
            yield from _checked(hook, wanted, result)


def _implementations(caller: pluggy.HookCaller, remedy: str) -> list[pluggy.HookImpl]:
    found = caller.get_hookimpls()
    if any(one.wrapper or one.hookwrapper for one in found):
        raise PluginError(f"{caller.name} is a wrapper; there is nothing to wrap. {remedy}")
    return found


def _selector(manager: pluggy.PluginManager) -> Callable[..., Any] | None:
    caller: pluggy.HookCaller = getattr(manager.hook, SELECT)
    return caller if _implementations(caller, "Return a candidate or None.") else None


def _checked(hook: str, wanted: type[Spec], result: Any) -> Iterable[Spec]:
    if isinstance(result, Spec) or not isinstance(result, Iterable):
        raise PluginError(
            f"{hook} must return a list of {wanted.__name__} objects, got {result!r}."
        )
    for spec in result:
        if not isinstance(spec, wanted):
            raise PluginError(f"{hook} must return {wanted.__name__} objects, got {spec!r}.")
        yield spec


def _check_repeats(specs: Iterable[Spec]) -> None:
    seen = set()
    for spec in specs:
        if (spec.kind, spec.key) in seen:
            raise PluginError(f"The plugin declares the {spec.kind} {spec.key!r} twice.")
        seen.add((spec.kind, spec.key))
