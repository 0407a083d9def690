"""Reports: what quantization costs and saves, operation by operation."""
