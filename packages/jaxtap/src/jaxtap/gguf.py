"""llama.cpp's files: ``load``, ``save`` and ``read_metadata``.

``Source`` and ``Target`` say which tensor a parameter is read from and becomes, and how it is
transposed; ``rules_of`` gives a plan the formats of what was loaded.
"""

from typing import Any

from ._needs import needed

_xla: Any = needed("provider_xla", "xla", "jaxtap.gguf")
load, save, read_metadata = _xla.load_gguf, _xla.save_gguf, _xla.read_gguf_metadata
Source, Target, rules_of = _xla.Source, _xla.Target, _xla.rules_of

__all__ = ["Source", "Target", "load", "read_metadata", "rules_of", "save"]
