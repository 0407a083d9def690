"""LoRA and QLoRA by rule: float adapters for stored or float parameters."""
