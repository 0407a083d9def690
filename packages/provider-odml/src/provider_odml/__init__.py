"""provider-odml: train any JAX program for LiteRT.

Importing this package does not import jax, so that plugin discovery stays light.
"""

from importlib.metadata import version
from typing import Any

from interception_core import lazy_exports

__version__ = version("provider-odml")
_get, __dir__, __all__ = lazy_exports(__name__)


def __getattr__(name: str) -> Any:
    try:
        return _get(name)
    except ModuleNotFoundError as error:
        if error.name != "provider_odml_export":
            raise
        from .errors import MissingExtraError

        raise MissingExtraError(f"{__name__}.{name}", "provider-odml-export", "export") from error
