"""Functions as programs: compiled whole, where eager JAX compiles each operation."""

import functools

import jax
import numpy as np


def as_program(fn):
    """Return a function that is compiled for its arrays; all else in its arguments is static."""

    @functools.partial(jax.jit, static_argnums=0)
    def run(static, arrays):
        tree, leaves = static
        given = iter(arrays)
        args, options = tree.unflatten([next(given) if x is jax.Array else x for x in leaves])
        return fn(*args, **options)

    @functools.wraps(fn)
    def call(*args, **options):
        leaves, tree = jax.tree.flatten((args, options))
        arrays = [x for x in leaves if isinstance(x, np.ndarray | jax.Array)]
        static = tuple(jax.Array if isinstance(x, np.ndarray | jax.Array) else x for x in leaves)
        return run((tree, static), arrays)

    return call
