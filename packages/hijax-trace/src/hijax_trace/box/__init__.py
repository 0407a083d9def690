"""Box: a mutable cell that works under all of JAX's transformations."""
