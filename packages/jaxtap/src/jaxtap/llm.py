"""Language models: ``load`` a folder of one, ``quantize`` or ``finetune`` it, and generate.

``Generator(config, params, plan)`` is what ``jaxtap llm generate`` runs.
"""

from typing import Any

from ._needs import needed

_llm: Any = needed("jaxtap_llm", "llm", "jaxtap.llm")

__all__ = list(_llm.__all__)


def __getattr__(name: str) -> Any:
    return getattr(_llm, name)
