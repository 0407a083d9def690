"""Running: quantized operations, and programs with stored parameters."""
