"""High-level types: one JAX value to the program, and several arrays to XLA."""
