"""vLLM's and llm-compressor's folders: ``load`` and ``save``."""

from typing import Any

from ._needs import needed

_xla: Any = needed("provider_xla", "xla", "jaxtap.compressed_tensors")
load, save = _xla.load_compressed_tensors, _xla.save_compressed_tensors

__all__ = ["load", "save"]
