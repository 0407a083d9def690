"""Functions of every kind that can be tapped. Only the suite taps them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


class Refused(Exception):
    """Raised by `refuse`."""


def affine(x: Any, w: Any, bias: Any = None, *, scale: int = 1, mode: str = "linear") -> Any:
    """Has optional arguments, and some that are no arrays."""
    y = jnp.dot(x, w) * scale
    y = y if bias is None else y + bias
    return jnp.maximum(y, 0) if mode == "relu" else y


def step(x: Any, w: Any) -> Any:
    """Is called directly and by `composite`."""
    return jnp.dot(x, w)


def composite(x: Any, w: Any) -> Any:
    """Consists of calls of other targets."""
    return step(step(x, w), w)


def even(x: Any, n: int) -> Any:
    """Recurs through `odd`; doubles ``x`` ``n`` times."""
    return x if n == 0 else odd(x * 2, n - 1)


def odd(x: Any, n: int) -> Any:
    """Recurs through `even`."""
    return x if n == 0 else even(x * 2, n - 1)


def pair(tree: dict[str, Any]) -> dict[str, Any]:
    """Takes and returns a pytree."""
    return {"sum": tree["x"] + tree["rest"][0], "both": (tree["x"], tree["rest"][0] * 2)}


def refuse(x: Any) -> Any:
    """Raises."""
    raise Refused(x.shape)


@jax.jit
def jitted(x: Any, w: Any) -> Any:
    """Is jitted."""
    return jnp.dot(x, w)


@jax.custom_jvp
def clipped(x: Any) -> Any:
    """Has a derivative rule."""
    return jnp.maximum(x, 0)


clipped.defjvp(lambda primals, tangents: (clipped(*primals), tangents[0]))


@jax.custom_vjp
def straight(x: Any) -> Any:
    """Has a backward rule."""
    return jnp.round(x)


straight.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))


class Layer:
    """Has a method, and instances that can be called."""

    def __init__(self, factor: int):
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        """Multiplies."""
        return x * self.factor

    def shifted(self, x: Any) -> Any:
        """Adds."""
        return x + self.factor


layer = Layer(3)
other = Layer(5)
number = 7
alias = step
