"""``"module:attribute"`` strings: how a declaration names its implementation.

Declaring the string costs nothing; the module is imported when the thing is first used.
"""

import pkgutil
from typing import Any

from ..errors import PluginError, one_line

PATH_FORM = "'package.module:attribute'"


def is_path(text: object) -> bool:
    """Whether a value has the form ``"package.module:attribute"``; nothing is imported."""
    if not isinstance(text, str):
        return False
    module, colon, attribute = text.partition(":")
    return bool(colon) and all(
        part.isidentifier() for dotted in (module, attribute) for part in dotted.split(".")
    )


def resolve(path: str, owner: str) -> Any:
    """Imports the object that a path names.

    Args:
        path: a ``"package.module:attribute"`` string; the attribute may be dotted.
        owner: who declared it, for the error: ``"Provider 'acme' of plugin 'acme'"``.

    Returns:
        The object, which is callable: a path always names something to call.

    Raises:
        PluginError: the module cannot be imported, has no such attribute, or has something
            there that cannot be called. The original exception, if any, is the cause.
    """
    try:
        found = pkgutil.resolve_name(path)
    except (Exception, SystemExit) as error:
        raise PluginError(f"{owner}: cannot load {path!r}: {one_line(error)}") from error
    if not callable(found):
        raise PluginError(f"{owner}: {path!r} is not callable, it is {found!r}.")
    return found
