"""Targets: functions of every kind that can be tapped."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp


class Refused(Exception):
    """Raised by `refuse`."""


def affine(x: Any, w: Any, bias: Any = None, *, scale: int = 1, mode: str = "linear") -> Any:
    """Compute with optional arguments, some of which are not arrays."""
    y = jnp.dot(x, w) * scale
    y = y if bias is None else y + bias
    return jnp.maximum(y, 0) if mode == "relu" else y


def step(x: Any, w: Any) -> Any:
    """Compute a step, called directly and by `composite`."""
    return jnp.dot(x, w)


def composite(x: Any, w: Any) -> Any:
    """Compute by calls of other targets."""
    return step(step(x, w), w)


def even(x: Any, n: int) -> Any:
    """Double ``x`` ``n`` times, by recursion through `odd`."""
    return x if n == 0 else odd(x * 2, n - 1)


def odd(x: Any, n: int) -> Any:
    """Double ``x`` by recursion through `even`."""
    return x if n == 0 else even(x * 2, n - 1)


def pair(tree: dict[str, Any]) -> dict[str, Any]:
    """Take and returns a pytree."""
    return {"sum": tree["x"] + tree["rest"][0], "both": (tree["x"], tree["rest"][0] * 2)}


def refuse(x: Any) -> Any:
    """Raise."""
    raise Refused(x.shape)


@jax.jit
def jitted(x: Any, w: Any) -> Any:
    """Compute under jit."""
    return jnp.dot(x, w)


@jax.custom_jvp
def clipped(x: Any) -> Any:
    """Clip, with a derivative rule."""
    return jnp.maximum(x, 0)


clipped.defjvp(lambda primals, tangents: (clipped(*primals), tangents[0]))


@jax.custom_vjp
def straight(x: Any) -> Any:
    """Round, with a backward rule."""
    return jnp.round(x)


straight.defvjp(lambda x: (jnp.round(x), None), lambda _, ct: (ct,))


class Layer:
    """Has a method, and instances that can be called."""

    def __init__(self, factor: int):
        self.factor = factor

    def __call__(self, x: Any) -> Any:
        """Multiply."""
        return x * self.factor

    def shifted(self, x: Any) -> Any:
        """Add."""
        return x + self.factor


layer = Layer(3)
other = Layer(5)
number = 7
alias = step
