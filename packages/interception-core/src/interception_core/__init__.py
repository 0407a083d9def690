"""interception-core: taps JAX functions and primitives, and hosts jaxtap's plugins.

Importing this package does not import jax: the names that need it are imported when they are
first used. A plugin module may therefore import its specs and `hookimpl` from here.

`plugins` is a function, and a folder has this name, too. The import below loads the folder before
it binds the function, so that no later import rebinds the name.
"""

import importlib
from importlib.metadata import version

from .imports import when_imported
from .lazy import lazy_exports
from .plugins.host import plugins  # noqa: F401
from .versions import check_jax

__version__ = version("interception-core")
__getattr__, __dir__, __all__ = lazy_exports(__name__)


def _begin(_: object) -> None:
    check_jax()
    # At once with jax: later, JAX would trace and compile all functions again that ran before.
    importlib.import_module(".cache_key", __name__)


when_imported("jax", _begin)
