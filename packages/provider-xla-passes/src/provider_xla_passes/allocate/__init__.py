"""Choose the bits of each parameter for the least output error."""
