"""provider-odml-aeq: quantize exported files after training, by ai-edge-quantizer.

Importing this package imports neither jax nor ai-edge-quantizer.
"""

from importlib.metadata import version
from typing import TYPE_CHECKING, Any

__version__ = version("provider-odml-aeq")

if TYPE_CHECKING:
    from .backend import AeqBackend

__all__ = ["AeqBackend"]


def __getattr__(name: str) -> Any:
    if name != "AeqBackend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from .backend import AeqBackend

    return AeqBackend
