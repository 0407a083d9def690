"""provider-xla: quantizes the matmuls and convolutions of a JAX program, JIT on.

Importing this package does not import jax, so that plugin discovery stays light.
"""

from importlib.metadata import version
from typing import Any

from interception_core import lazy_exports

__version__ = version("provider-xla")
_get, __dir__, __all__ = lazy_exports(__name__)


def __getattr__(name: str) -> Any:
    try:
        return _get(name)
    except ModuleNotFoundError as error:
        from .extras import explained

        raise explained(f"{__name__}.{name}", error) from error
