"""LoRA and QLoRA by rule: float adapters beside parameters that are quantized, or not."""

from ._plan import LoraPlan, LoraSurvey, check_engine

__all__ = ["LoraPlan", "LoraSurvey", "check_engine"]
