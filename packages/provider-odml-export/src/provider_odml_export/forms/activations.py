"""Activations as the operations that LiteRT has integer kernels for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .barriers import FakeQuant, island, unquantized

UNIT = (0.0, 255 / 256)
"""The range of SOFTMAX and LOGISTIC: scale 1/256, zero point -128; with 16 bits 1/32768."""
LOGARITHMIC = (-255 / 16, 0.0)
"""The range of LOG_SOFTMAX: scale 16/256, zero point 127."""


def _over_one_axis(
    function: Callable[..., jax.Array],
    last: Callable[[jax.Array], jax.Array],
    name: str,
    span: tuple[float, float],
) -> Callable[..., jax.Array]:
    """Return an activation over an axis as LiteRT has it: over the last one.

    Args:
        function: JAX's, called as ``function(x, axis, where)``: several axes and ``where`` stay
            float.
        last: the same over the last axis, as the converter recognizes it.
        name: what ``fake_quant`` is told.
        span: the range that LiteRT's kernel insists on.
    """

    def form(
        x: jax.Array,
        axis: int | Sequence[int] | None = -1,
        where: Any = None,
        *,
        fake_quant: FakeQuant = unquantized,
    ) -> jax.Array:
        if where is not None or not isinstance(axis, int):
            return island(function)(x, axis, where)
        return jnp.moveaxis(fake_quant(last(jnp.moveaxis(x, axis, -1)), name, span), -1, axis)

    return form


def _log_softmax(x: jax.Array) -> jax.Array:
    shifted = x - jnp.max(x, -1, keepdims=True)
    return shifted - jnp.log(jnp.sum(jnp.exp(shifted), -1, keepdims=True))


softmax = _over_one_axis(jax.nn.softmax, jax.nn.softmax, "softmax", UNIT)
log_softmax = _over_one_axis(jax.nn.log_softmax, _log_softmax, "log_softmax", LOGARITHMIC)


def gelu(x: jax.Array, approximate: bool = True) -> jax.Array:
    """Return ``jax.nn.gelu``, also the exact one, as one GELU."""

    def body(x: jax.Array, *, approximate: str) -> jax.Array:
        return jax.nn.gelu(x, approximate=approximate == "tanh")

    named = lax.composite(body, name="aten.gelu.default")
    return named(x, approximate="tanh" if approximate else "none")


def neg(x: jax.Array, *, fake_quant: FakeQuant = unquantized) -> jax.Array:
    """Return ``jax.lax.neg`` as SUB: NEG is float.

    Args:
        x: its input.
        fake_quant: is given ``"zero"``, the constant that `x` is subtracted from.
    """
    return fake_quant(jnp.zeros((), x.dtype), "zero", (0.0, 1.0)) - x


def div(x: Any, y: Any, *, fake_quant: FakeQuant = unquantized) -> jax.Array:
    """Return ``jax.lax.div`` by a constant as MUL; else it is float.

    LiteRT's 8-bit DIV returns an end of its range where the quotient is near 0.

    Args:
        x: the dividend.
        y: the divisor.
        fake_quant: is given ``"reciprocal"``, one over a constant divisor.
    """
    if isinstance(y, jax.core.Tracer) or not np.all(y) or not np.all(np.isfinite(y)):
        return island(lax.div)(x, y)
    reciprocal = jnp.asarray(1 / np.asarray(y, np.float64), jnp.asarray(y).dtype)
    return x * fake_quant(reciprocal, "reciprocal", None)
