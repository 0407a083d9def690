"""Imports of other packages: what is done once a program has imported one."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any


def when_imported(name: str, action: Callable[[ModuleType], object]) -> None:
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
        return
    _waiting.setdefault(name, []).append(action)
    if _FINDER not in sys.meta_path:
        sys.meta_path.insert(0, _FINDER)


_waiting: dict[str, list[Callable[[ModuleType], object]]] = {}
"""The actions that wait for a module, by its name."""


class _Finder(importlib.abc.MetaPathFinder):
    """Finds modules that actions wait for, as the others do."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in _waiting:
            return None
        others = [finder for finder in sys.meta_path if finder is not self]
        found = (finder.find_spec(fullname, path, target) for finder in others)
        spec = next((one for one in found if one is not None), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


_FINDER = _Finder()


class _Loader(importlib.abc.Loader):
    """Loads a module, then calls what waits for it. The module has the loader that found it."""

    def __init__(self, loader: Any):
        self._loader = loader

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # Not before: an import that failed may be tried again.
        actions = _waiting.pop(module.__name__, [])
        if not _waiting and _FINDER in sys.meta_path:
            sys.meta_path.remove(_FINDER)
        for action in actions:
            action(module)
