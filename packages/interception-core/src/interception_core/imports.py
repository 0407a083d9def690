"""Imports of other packages: what is done once a program has imported one."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[ModuleType], None]) -> None:
    """Call an action with a module once that is imported: now, or after its import.

    So a package registers its types with a library that the program may never use, without
    importing it.

    Args:
        name: of the module, such as ``"flax.serialization"``.
        action: called once, with the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
    else:
        sys.meta_path.insert(0, _Finder(name, action))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds one module as the others do, and adds an action to its import."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]):
        self._name, self._action = name, action

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(self, spec.loader, self._action)
        return spec


class _Loader(importlib.abc.Loader):
    """Loads a module, then calls an action. The module has the loader that found it."""

    def __init__(self, finder: _Finder, loader: Any, action: Callable[[ModuleType], None]):
        self._finder, self._loader, self._action = finder, loader, action

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # Not before: an import that failed may be tried again.
        if self._finder in sys.meta_path:
            sys.meta_path.remove(self._finder)
            self._action(module)
