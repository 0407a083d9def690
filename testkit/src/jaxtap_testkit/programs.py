"""Functions as programs: compiled whole, where eager JAX compiles each operation; and counted."""

import functools
import sys

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


def python_calls(action, *args):
    """Return how many Python functions are called while an action runs."""
    count = 0

    def profile(frame, event, arg):
        nonlocal count
        count += event == "call"

    old = sys.getprofile()
    sys.setprofile(profile)
    try:
        action(*args)
    finally:
        sys.setprofile(old)
    return count
