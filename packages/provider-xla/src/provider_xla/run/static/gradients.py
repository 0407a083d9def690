"""Gradients: the backward pass records their ranges."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

import quant_numerics as qn

from ...errors import QuantizationError
from .place import Place
from .ranges import max_of_all

WITHOUT_GRADIENTS = (
    "Give this operation a rule with bwd_static_scale=False, or use apply(..., update=False)"
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def watched(op_id: str, statistics: qn.Statistics, place: Place, y: jax.Array) -> jax.Array:
    """Return ``y``; the backward pass adds the largest magnitude of its gradient to statistics."""
    return y


def _watched_forward(
    op_id: str, statistics: qn.Statistics, place: Place, y: jax.Array
) -> tuple[Any, Any]:
    return y, (statistics, place)


def _watched_backward(op_id: str, kept: Any, g: jax.Array) -> tuple[None, None, jax.Array]:
    statistics, place = kept
    g = refused(f"{op_id} can't have a second derivative, since its backward pass writes", "", g)
    seen = jnp.abs(lax.stop_gradient(g))
    found = qn.Calibration(None, max_of_all(jnp.max(seen, initial=0).astype(np.float32)))
    state = statistics.state  # what other steps of a loop have left
    new = statistics.average.record(place.state(state), found)
    statistics.state = place.put_state(state, new)
    return None, None, g


watched.defvjp(_watched_forward, _watched_backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def refused(why: str, instead: str, y: jax.Array) -> jax.Array:
    """Return ``y``, which raises an error if it is differentiated."""
    return y


@refused.defjvp
def _refused_jvp(why: str, instead: str, primals: Any, tangents: Any) -> Any:
    raise QuantizationError(f"With bwd_static_scale=True {why}. {instead}{WITHOUT_GRADIENTS}.")
