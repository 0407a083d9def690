"""Numbers: random arrays. NumPy draws them, since XLA takes 40 ms to compile what draws."""

import jax.numpy as jnp
import numpy as np


def normal(*shape, seed=0, dtype="float32"):
    """Return normally distributed numbers, as an array of JAX."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape).astype(dtype))
