"""Optimizers with small states: ``optim.adamw_8bit(1e-3)``."""

from typing import Any

from ._needs import needed

_optim: Any = needed("quant_optim", "optim", "jaxtap.optim")
adam_8bit, adamw_8bit = _optim.adam_8bit, _optim.adamw_8bit
scale_by_adam_8bit = _optim.scale_by_adam_8bit

__all__ = ["adam_8bit", "adamw_8bit", "scale_by_adam_8bit"]
