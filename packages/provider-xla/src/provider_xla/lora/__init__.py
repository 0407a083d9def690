"""LoRA and QLoRA by rule: float adapters beside parameters that are quantized, or not."""
