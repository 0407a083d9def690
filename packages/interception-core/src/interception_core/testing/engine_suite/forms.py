"""Forms: one matmul in each form that JAX caches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

Product = Callable[[Any, Any], Any]


def _checkpoint(x: Any, w: Any) -> Any:
    return jax.checkpoint(lambda x, w: x @ w)(x, w)


def _scan(x: Any, w: Any) -> Any:
    return lax.scan(lambda carry, row: (carry, row @ w), 0, x)[1]


def _while(x: Any, w: Any) -> Any:
    start = (0, jnp.zeros((4, 4), jnp.float32))
    return lax.while_loop(lambda s: s[0] < 1, lambda s: (s[0] + 1, x @ w), start)[1]


def _cond(x: Any, w: Any) -> Any:
    return lax.cond(x[0, 0] < 1e9, lambda x, w: x @ w, lambda x, w: x, x, w)


def _switch(x: Any, w: Any) -> Any:
    index = jnp.int32(x[0, 0] < 1e9)
    return lax.switch(index, [lambda x, w: x, lambda x, w: x @ w], x, w)


def _vmap(x: Any, w: Any) -> Any:
    return jax.vmap(lambda row: row @ w)(x)


def _make_custom_vjp() -> Product:
    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda res, ct: (ct @ res[1].T, res[0].T @ ct))
    return lambda x, w: product(x, w)


def _make_custom_jvp() -> Product:
    @jax.custom_jvp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    product.defjvp(lambda primals, tangents: (primals[0] @ primals[1], tangents[0] @ primals[1]))
    return lambda x, w: product(x, w)


# Each makes a new function, so that forms share nothing but the caches of JAX's functions.
FORMS: dict[str, Callable[[], Product]] = {
    "matmul operator": lambda: lambda x, w: x @ w,
    "jnp.dot": lambda: lambda x, w: jnp.dot(x, w),
    "jnp.inner": lambda: lambda x, w: jnp.inner(x, w),
    "jnp.matmul": lambda: lambda x, w: jnp.matmul(x, w),
    "jnp.einsum": lambda: lambda x, w: jnp.einsum("ij,jk->ik", x, w),
    "lax.dot_general": lambda: lambda x, w: lax.dot_general(x, w, (((1,), (0,)), ((), ()))),
    "jitted": lambda: jax.jit(lambda x, w: jnp.abs(x) @ w),
    "checkpoint": lambda: _checkpoint,
    "scan": lambda: _scan,
    "while": lambda: _while,
    "cond": lambda: _cond,
    "switch": lambda: _switch,
    "vmap": lambda: _vmap,
    "custom_vjp": _make_custom_vjp,
    "custom_jvp": _make_custom_jvp,
}
"""Makers of functions of two 4x4 matrices that return their product."""

DIFFERENTIABLE = [form for form in FORMS if form != "while"]
"""Those with a gradient: a while loop has none in reverse."""
