"""High-level types: values that are one JAX value to the program and several arrays to XLA."""
