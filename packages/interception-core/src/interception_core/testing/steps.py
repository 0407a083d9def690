"""Steps: operations that keep the shape of a vector or matrix."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array
Params = dict[str, Array]

CONSTANT = np.linspace(-1, 1, 4, dtype=np.float32)
ORDER = np.array([2, 0, 3, 1], np.int32)


def _attention(x: Array, p: Params) -> Array:
    rows = jnp.atleast_2d(x)
    weights = jax.nn.softmax(jnp.einsum("qd,kd->qk", jnp.dot(rows, p["a"]), rows), axis=-1)
    return jnp.einsum("qk,kd->qd", weights, rows).reshape(x.shape)


def _slices(x: Array, p: Params) -> Array:
    left = lax.dynamic_slice_in_dim(x, 1, 2, axis=-1)
    return jnp.concatenate([left, x[..., :1], x[..., 3:]], axis=-1)


def _norm(x: Array, p: Params) -> Array:
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return (x - mean) * lax.rsqrt(jnp.mean((x - mean) ** 2, axis=-1, keepdims=True) + 0.5)


def _product(x: Array, p: Params) -> Array:
    return lax.dot_general(x, p["a"], (((x.ndim - 1,), (0,)), ((), ())))


STEPS: dict[str, Callable[[Array, Params], Array]] = {
    "dot": lambda x, p: jnp.dot(x, p["a"]),
    "dot, transposed": lambda x, p: jnp.dot(x, p["b"].T),
    "matmul": lambda x, p: x @ p["b"],
    "matmul of two weights": lambda x, p: x @ (p["a"] @ p["b"]),
    "dot_general": _product,
    "einsum": lambda x, p: jnp.einsum("...i,ij->...j", x, p["a"]),
    "einsum of three": lambda x, p: jnp.einsum("...i,ij,jk->...k", x, p["a"], p["b"]),
    "einsum of a constant": lambda x, p: jnp.einsum("...i,i->...i", x, CONSTANT),
    "attention": _attention,
    "softmax": lambda x, p: jax.nn.softmax(x, axis=-1),
    "log_softmax": lambda x, p: jax.nn.log_softmax(x, axis=-1),
    "gelu": lambda x, p: jax.nn.gelu(x),
    "silu": lambda x, p: jax.nn.silu(x),
    "relu": lambda x, p: jax.nn.relu(x),
    "tanh": lambda x, p: jnp.tanh(x),
    "exp": lambda x, p: jnp.exp(-x * x),
    "bias": lambda x, p: x + p["bias"],
    "constant": lambda x, p: x * CONSTANT + jnp.asarray(CONSTANT)[0],
    "norm": _norm,
    "sums": lambda x, p: x - jnp.sum(x, axis=-1, keepdims=True) / 4,
    "maximum": lambda x, p: x / (1 + jnp.max(jnp.abs(x))),
    "cumsum": lambda x, p: jnp.cumsum(x, axis=-1) / 4,
    "where": lambda x, p: jnp.where(x > 0, x, x / 4),
    "clip": lambda x, p: jnp.clip(x, -0.5, 2.0),
    "gather": lambda x, p: x[..., ORDER],
    "take": lambda x, p: jnp.take(x, ORDER, axis=-1),
    "scatter": lambda x, p: x.at[..., 1].add(x[..., 0]),
    "slices": _slices,
    "flip": lambda x, p: jnp.flip(x, axis=-1),
    "sort": lambda x, p: jnp.sort(x, axis=-1),
}
"""Each is called with the array and the program's parameters."""
