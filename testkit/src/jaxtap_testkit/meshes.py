"""Meshes: meshes for tests of sharding, and arrays on them."""

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec


def line(kind=AxisType.Auto, size=8, name="d"):
    """Return a mesh of one axis, which is of the given type."""
    return jax.make_mesh((size,), (name,), (kind,), devices=jax.devices("cpu")[:size])


def grid(shape, names, kind=AxisType.Auto):
    """Return a mesh of two axes of the same type."""
    devices = jax.devices("cpu")[: shape[0] * shape[1]]
    return jax.make_mesh(shape, names, (kind,) * 2, devices=devices)


def put(mesh, x, *spec):
    """Return an array that is sharded over a mesh."""

    def in_numpy(x):  # JAX compiles a program that cuts its arrays
        plain = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
        return np.asarray(x) if plain and x.dtype.kind in "biufV" else x

    x = jax.tree.map(in_numpy, x)
    return jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
