"""Adapters: ``Rule(weight="nf4", lora=8)``, then ``init``, training, and ``merge``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ._needs import needed

_xla: Any = needed("provider_xla", "xla", "jaxtap.lora")
_check_has: Any = needed("provider_xla.cli", "xla", "jaxtap.lora").check_has
AdaptedWeight, mask, merge_model = _xla.AdaptedWeight, _xla.adapter_mask, _xla.merge_model

__all__ = ["AdaptedWeight", "init", "mask", "merge", "merge_model"]


def init(plan: Any, key: Any, dtype: Any = None) -> Any:
    """Return the adapters of a plan, which change nothing yet; see ``Plan.init_adapters``."""
    _check_has(plan, "init_adapters", "jaxtap.lora.init")
    return plan.init_adapters(key, dtype)


def merge(plan: Any, params: Any, adapters: Mapping[str, Any]) -> Any:
    """Return float parameters with adapters added; see ``Plan.merge``."""
    _check_has(plan, "merge", "jaxtap.lora.merge")
    return plan.merge(params, adapters)
