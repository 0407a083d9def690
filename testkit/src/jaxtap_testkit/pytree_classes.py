"""A pytree class that checks its array, as layers of models do."""

import jax
import jax.numpy as jnp


@jax.tree_util.register_pytree_node_class
class Dense:
    """A layer that takes a matrix of floats alone."""

    def __init__(self, w, width):
        assert w.ndim == 2
        assert w.shape[0] == width
        assert w.size == width * w.shape[1]
        assert jnp.issubdtype(w.dtype, jnp.floating)
        self.w, self.width = w, width

    def tree_flatten(self):
        return (self.w,), self.width

    @classmethod
    def tree_unflatten(cls, width, children):
        return cls(*children, width)
