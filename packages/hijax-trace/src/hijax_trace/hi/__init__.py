"""High-level types: one value to a program, several arrays to XLA."""
