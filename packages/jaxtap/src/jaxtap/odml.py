"""A phone: training for LiteRT, and export of a verified ``.tflite``."""

from typing import Any

from ._needs import needed

_odml: Any = needed("provider_odml", "odml", "jaxtap.odml")

__all__ = list(_odml.__all__)


def __getattr__(name: str) -> Any:
    return getattr(_odml, name)
