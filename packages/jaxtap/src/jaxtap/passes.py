"""Passes over data that round better: ``plan.optimize(params, batches, [Hadamard(), Gptq()])``."""

from typing import Any

from ._needs import needed

_xla: Any = needed("provider_xla", "xla", "jaxtap.passes")
Awq, Gptq, Hadamard, Pass = _xla.Awq, _xla.Gptq, _xla.Hadamard, _xla.Pass
Ranges, SmoothQuant, Wanda = _xla.Ranges, _xla.SmoothQuant, _xla.Wanda

__all__ = ["Awq", "Gptq", "Hadamard", "Pass", "Ranges", "SmoothQuant", "Wanda"]
