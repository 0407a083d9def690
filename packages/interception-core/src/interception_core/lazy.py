"""Public names of packages, each imported when it is first used."""

import ast
import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any


def lazy_exports(package: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return ``__getattr__``, ``__dir__`` and ``__all__`` of a package.

    The stub ``__init__.pyi`` beside its ``__init__.py`` lists the names, for this function and for
    type checkers: ``from .store.save import save as save``. So plugin discovery imports a package
    without importing jax.

    Args:
        package: its ``__name__``.
    """
    module = sys.modules[package]
    stub = Path(module.__file__ or "").with_suffix(".pyi")
    sources = {
        alias.asname: ("." * statement.level + (statement.module or ""), alias.name)
        for statement in ast.parse(stub.read_text("utf-8")).body
        if isinstance(statement, ast.ImportFrom)
        for alias in statement.names
        if alias.asname is not None
    }

    def get(name: str) -> Any:
        if name not in sources:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        source, own = sources[name]
        if source.strip("."):
            value = getattr(importlib.import_module(source, package), own)
        else:  # from . import own
            value = importlib.import_module(source + own, package)
        setattr(module, name, value)
        return value

    return get, lambda: sorted({*vars(module), *sources}), sorted(sources)
