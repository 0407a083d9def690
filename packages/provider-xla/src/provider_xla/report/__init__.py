"""Reports: what quantization costs a program, operation by operation, and what it saves."""
