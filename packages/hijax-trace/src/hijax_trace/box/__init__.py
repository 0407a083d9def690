"""Box: a mutable cell for arrays, of any structure, that JAX's transformations carry along."""
