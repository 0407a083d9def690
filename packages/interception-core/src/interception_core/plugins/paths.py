"""Paths: ``"module:attribute"`` strings, by which specs name implementations.

A declaration costs nothing: the module is imported when the thing is first used.
"""

import pkgutil
from typing import Any

from ..errors import PluginError, one_line

PATH_FORM = "'package.module:attribute'"


def is_path(text: object) -> bool:
    """Return whether a value has the form ``"package.module:attribute"``."""
    if not isinstance(text, str):
        return False
    module, colon, attribute = text.partition(":")
    return bool(colon) and all(
        part.isidentifier() for dotted in (module, attribute) for part in dotted.split(".")
    )


def resolve(path: str, owner: str) -> Any:
    """Import the object that a path names.

    Args:
        path: a ``"package.module:attribute"`` string. The attribute may be dotted.
        owner: the declaration, for the error: ``"Provider 'acme' of plugin 'acme'"``.

    Raises:
        PluginError: the module can't be imported, has no such attribute, or the object can't be
            called. The original exception, if any, is the cause.
    """
    try:
        found = pkgutil.resolve_name(path)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{owner}: cannot load {path!r}: {one_line(error)}") from error
    if not callable(found):
        raise PluginError(
            f"{owner}: {path!r} must be callable, got {found!r}. Name a function or a class."
        )
    return found
