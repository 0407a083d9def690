"""Quantized folders of Hugging Face: ``load`` any method, and ``save`` as compressed-tensors.

``Source`` and ``Target`` say which tensor a parameter is read from and becomes, and how it is
transposed; ``rules_of`` gives a plan the formats of what was loaded.
"""

from typing import Any

from ._needs import needed

_xla: Any = needed("provider_xla", "xla", "jaxtap.huggingface")
load, save = _xla.load_huggingface, _xla.save_compressed_tensors
Source, Target, rules_of = _xla.Source, _xla.Target, _xla.rules_of

__all__ = ["Source", "Target", "load", "rules_of", "save"]
