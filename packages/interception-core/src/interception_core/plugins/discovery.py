"""The metadata plane: which plugins are installed."""

from collections.abc import Iterable
from importlib.metadata import Distribution, EntryPoint, distributions, entry_points

from .hookspecs import PROJECT
from .records import PluginRecord


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
