"""Box: a mutable cell for a pytree of arrays that works under JAX's transformations."""
