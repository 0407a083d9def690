"""The metadata plane: which plugins are installed, and the outcome of loading each."""

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points
from typing import Any, Literal, TypeAlias

from ..errors import one_line
from .hookspecs import PROJECT
from .specs import Spec

Status: TypeAlias = Literal["ok", "failed", "disabled", "conflict"]
Phase: TypeAlias = Literal["metadata", "import", "api", "hooks", "declare"]


@dataclass(frozen=True, slots=True)
class PluginRecord:
    """An installed plugin, and the outcome of loading it.

    Attributes:
        name: the entry-point name; `JAXTAP_DISABLE_PLUGINS` takes it.
        module: the plugin module, as in the entry point.
        distribution: the plugin's distribution, such as ``"acme-quant"``.
        version: the version of that distribution.
        status: ``"ok"``; ``"failed"``, left out; ``"disabled"``, left out on request;
            ``"conflict"``, without the names that another plugin claims, too.
        phase: the last phase, so for a failed plugin the one that failed: ``"metadata"`` (the
            entry point), ``"import"`` (of the module), ``"api"`` (the version), ``"hooks"`` (their
            names and arguments) or ``"declare"`` (their results).
        error: why the plugin failed, or its conflict, with cause and traceback; or None.
        specs: the declarations; none unless the plugin was loaded.
        notes: faults that a plugin is not left out for.
    """

    name: str
    module: str
    distribution: str
    version: str
    status: Status = "ok"
    phase: Phase = "metadata"
    error: BaseException | None = None
    specs: tuple[Spec, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def label(self) -> str:
        """The plugin and where it comes from, for messages."""
        return f"plugin {self.name!r} ({self.distribution} {self.version})"

    @property
    def provides(self) -> tuple[str, ...]:
        """The names of the declarations, such as ``"provider:acme"``."""
        return tuple(f"{spec.kind}:{spec.key}" for spec in self.specs)

    @property
    def reason(self) -> str:
        """Why the plugin failed, in one line; empty if it did not."""
        return "" if self.error is None else f"{self.phase}: {one_line(self.error)}"

    def as_json(self) -> dict[str, Any]:
        """Return the record as built-in types that `json` can write."""
        error = self.error
        return {
            "name": self.name,
            "distribution": self.distribution,
            "version": self.version,
            "module": self.module,
            "status": self.status,
            "phase": self.phase,
            "error": error and {"type": type(error).__name__, "message": str(error)},
            "provides": list(self.provides),
            "notes": list(self.notes),
        }


def discover() -> tuple[PluginRecord, ...]:
    """Return the installed plugins, not yet loaded, sorted by name."""
    try:
        found = [_from_entry_point(entry) for entry in entry_points(group=PROJECT)]
    except Exception:
        # One distribution with unreadable metadata makes that call fail for all.
        found = list(_one_by_one(distributions()))
    return tuple(sorted(found, key=lambda item: (item.name, item.distribution)))


def _identity(home: Distribution) -> tuple[str, str]:
    try:
        return home.name or "unnamed", home.version or "?"
    except Exception:
        # An incomplete installation must not hide the plugins of the complete ones.
        return "unnamed", "?"


def _from_entry_point(entry: EntryPoint) -> PluginRecord:
    distribution, version = ("?", "?") if entry.dist is None else _identity(entry.dist)
    return PluginRecord(entry.name, entry.value, distribution, version)


def _one_by_one(installed: Iterable[Distribution]) -> Iterable[PluginRecord]:
    seen = set()
    for home in installed:
        try:
            declares = f"[{PROJECT}]" in (home.read_text("entry_points.txt") or "")
        except Exception:
            declares = False
        name, version = _identity(home)
        # As for imports, an earlier entry of sys.path hides later ones.
        if not declares or name in seen:
            continue
        seen.add(name)
        try:
            yield from [
                _from_entry_point(entry) for entry in home.entry_points.select(group=PROJECT)
            ]
        except Exception as error:
            yield PluginRecord(name, "", name, version, error=error)
