"""dot_int8: gradients of weights, from quantized values that lie row by row."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from .. import checks
from ..batching import more_rows
from ..op import Op


def dot_int8(
    lhs: jax.Array, rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array
) -> jax.Array:
    """Sum products of int8 over rows, and rescale them.

    Results are ``float32(sum) * lhs_scale * rhs_scale``, rounded once per operation. The sums are
    exact, so these are the bits of ``lax.dot_general`` in int32, rescaled.

    Args:
        lhs: int8[..., rows, m].
        rhs: int8[..., rows, n].
        lhs_scale: float32[..., m].
        rhs_scale: float32[..., n].

    Returns:
        float32[..., m, n]. It has no derivative.

    Raises:
        TypeError, ValueError: an argument has another dtype or shape than above.
    """
    for name, side, scale in (("lhs", lhs, lhs_scale), ("rhs", rhs, rhs_scale)):
        checks.dtype("dot_int8", name, side.dtype, (jnp.int8,))
        checks.dtype("dot_int8", f"{name}_scale", scale.dtype, (jnp.float32,))
        if side.ndim < 2:
            raise ValueError(
                f"dot_int8: {name} must have 2 axes or more, rows and columns last, got "
                f"{side.shape}"
            )
        wanted = (*side.shape[:-2], side.shape[-1])
        checks.shape("dot_int8", f"{name}_scale", scale, wanted, f"one for each column of {name}")
    wanted = (*lhs.shape[:-1], rhs.shape[-1])
    checks.shape("dot_int8", "rhs", rhs, wanted, "rows as lhs has them")
    return _OP(None, lhs, rhs, lhs_scale, rhs_scale)


def _reference(
    _: None, lhs: jax.Array, rhs: jax.Array, lhs_scale: jax.Array, rhs_scale: jax.Array
) -> jax.Array:
    sums = jnp.einsum("...ki,...kj->...ij", lhs, rhs, preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32) * lhs_scale[..., None] * rhs_scale[..., None, :]


def _results(_: None, lhs: jax.Array, rhs: jax.Array, *_scales: jax.Array) -> Any:
    return jax.ShapeDtypeStruct((*lhs.shape[:-2], lhs.shape[-1], rhs.shape[-1]), jnp.float32)


_OP = Op("dot_int8", _reference, results=_results, batch=more_rows)
