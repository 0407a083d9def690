"""llama.cpp's files: ``load``, ``save`` and ``read_metadata``."""

from typing import Any

from ._needs import needed

_xla: Any = needed("provider_xla", "xla", "jaxtap.gguf")
load, save, read_metadata = _xla.load_gguf, _xla.save_gguf, _xla.read_gguf_metadata

__all__ = ["load", "read_metadata", "save"]
