"""dot_int8: products of int8 that a training step quantized, as they lie."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .. import checks
from ..batching import more_rows, widened
from ..op import Op


@dataclasses.dataclass(frozen=True)
class DotConfig:
    """Whether each side ends with the axis that is summed."""

    lhs_last: bool
    rhs_last: bool


def dot_int8(
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
    *,
    lhs_last: bool = False,
    rhs_last: bool = False,
) -> jax.Array:
    """Sum products of int8 over an axis of each side, and rescale them.

    Results are ``float32(sum) * lhs_scale * rhs_scale``, rounded once per operation. The sums are
    those of ``lax.dot_general`` in int32, with its bits: exact below 2**17 products, and beyond as
    long as none leaves int32, where it wraps. Without a flag a side is summed over its rows, as
    both are for the gradient of a weight.

    Args:
        lhs: int8[..., k, m], or int8[..., m, k] with `lhs_last`.
        rhs: int8[..., k, n], or int8[..., n, k] with `rhs_last`.
        lhs_scale: float32[..., m].
        rhs_scale: float32[..., n].
        lhs_last: whether the last axis of lhs is summed, else the one before.
        rhs_last: whether that of rhs is.

    Returns:
        float32[..., m, n]. It has no derivative.

    Raises:
        TypeError, ValueError: an argument has another dtype or shape than above.
    """
    config = DotConfig(bool(lhs_last), bool(rhs_last))
    sides = (("lhs", lhs, lhs_scale, lhs_last), ("rhs", rhs, rhs_scale, rhs_last))
    for name, side, scale, last in sides:
        checks.dtype("dot_int8", name, side.dtype, (jnp.int8,))
        checks.dtype("dot_int8", f"{name}_scale", scale.dtype, (jnp.float32,))
        if side.ndim < 2:
            raise ValueError(
                f"dot_int8: {name} must have 2 axes or more, rows and columns last, got "
                f"{side.shape}"
            )
        wanted = (*side.shape[:-2], side.shape[-2 if last else -1])
        axis = "row" if last else "column"
        checks.shape("dot_int8", f"{name}_scale", scale, wanted, f"one for each {axis} of {name}")
    length, kept = _length(lhs, lhs_last), rhs.shape[-2 if rhs_last else -1]
    pair = (kept, length) if rhs_last else (length, kept)
    wanted = (*lhs.shape[:-2], *pair)
    checks.shape("dot_int8", "rhs", rhs, wanted, "summed as lhs is")
    return _OP(config, lhs, rhs, lhs_scale, rhs_scale)


def _length(side: jax.Array, last: bool) -> int:
    """Return how many products each sum has."""
    return side.shape[-1 if last else -2]


def _reference(
    config: DotConfig,
    lhs: jax.Array,
    rhs: jax.Array,
    lhs_scale: jax.Array,
    rhs_scale: jax.Array,
) -> jax.Array:
    left, right = "ik" if config.lhs_last else "ki", "jk" if config.rhs_last else "kj"
    sums = jnp.einsum(f"...{left},...{right}->...ij", lhs, rhs, preferred_element_type=jnp.int32)
    return sums.astype(jnp.float32) * lhs_scale[..., None] * rhs_scale[..., None, :]


def _results(_: DotConfig, *operands: jax.Array) -> Any:
    scales = operands[2:]
    shape = (*scales[0].shape, scales[1].shape[-1])
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _attributes(config: DotConfig, *_: jax.Array) -> dict[str, Any]:
    return dataclasses.asdict(config)


def _more_sums(
    run: Any, config: DotConfig, size: int, in_batched: Sequence[bool], *operands: Any
) -> Any:
    """Run the op for all examples at once; more rows or columns, if one side is the same for all.

    A weight that all examples share would be copied for each.
    """
    left, right = (in_batched[i] or in_batched[i + 2] for i in (0, 1))
    if left and right:
        return more_rows(run, config, size, in_batched, *operands)
    side, last = (0, config.lhs_last) if left else (1, config.rhs_last)
    given = list(operands)
    # The examples go in front of the axis that is kept, and become one with it: [e, .., kept, ..]
    # is [.., e * kept, ..]. So are rows of the result, or its columns.
    for i, axis in ((side, -2 if last else -1), (side + 2, -1)):
        (x,) = widened(size, [in_batched[i]], operands[i])
        moved = jnp.moveaxis(x, 0, axis - 1)
        at = moved.ndim + axis
        given[i] = lax.collapse(moved, at - 1, at + 1)
    found = run(config, *given)
    at = found.ndim - (2 if left else 1)
    kept = found.shape[at] // size
    found = found.reshape(*found.shape[:at], size, kept, *found.shape[at + 1 :])
    return jnp.moveaxis(found, at, 0), True


_OP = Op("dot_int8", _reference, results=_results, attributes=_attributes, batch=_more_sums)
