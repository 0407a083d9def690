"""grouped_gemm_v2 in plain JAX."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..groups import as_rows, only_owned, owner, per_row
from ..matmul.sides import Side
from ..quantize import numbers
from ..quantize.modes import ScalingMode
from .config import GroupedConfig


def grouped(
    config: GroupedConfig,
    lhs: jax.Array,
    lhs_scale_inv: jax.Array,
    rhs: jax.Array,
    rhs_scale_inv: jax.Array,
    bias: jax.Array,
    group_sizes: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
) -> jax.Array:
    """Return the result for checked arguments; NaN where `beta` isn't 0."""
    mode, groups = config.mode, config.groups
    owners = owner(group_sizes, config.length)
    left = divided(config, config.left, decoded(config, config.left, lhs, lhs_scale_inv), owners,
                   group_sizes)  # fmt: skip
    wide = decoded(config, config.right, rhs, rhs_scale_inv)
    if config.rows:
        right = matrices(config, wide)
        sums = _of_rows(left, right, group_sizes)
        of_group = lambda x: per_row(x, owners)  # noqa: E731
    else:
        right = divided(config, config.right, wide, owners, group_sizes)
        sums, of_group = _of_contracted(left, right, group_sizes), lambda x: x
    each = (-1,) + (1,) * (sums.ndim - 1)
    if mode.is_tensor:
        sums = sums * of_group(lhs_scale_inv * rhs_scale_inv).reshape(each)
    elif mode is ScalingMode.CHANNEL_SCALING:
        sums = sums * lhs_scale_inv.reshape(*sums.shape[:-1], 1)
        columns = of_group(rhs_scale_inv.reshape(groups, -1))
        sums = sums * (columns if config.rows else columns[:, None])
    out = sums * of_group(alpha).reshape(each)
    if config.has_bias:
        out = out + of_group(bias.reshape(groups, -1).astype(jnp.float32))
    out = jnp.where(of_group(beta).reshape(each) == 0, out, jnp.nan)
    return out.astype(config.out_dtype).reshape(config.shape)


def _exact(x: jax.Array) -> dict[str, Any]:
    """Return how factors like this one are multiplied."""
    dtype = jnp.int32 if x.dtype == jnp.int8 else jnp.float32
    return {"precision": lax.Precision.HIGHEST, "preferred_element_type": dtype}


def _of_rows(left: jax.Array, right: jax.Array, sizes: jax.Array) -> jax.Array:
    return lax.ragged_dot(left, right, sizes, **_exact(left)).astype(jnp.float32)


# JAX has no gradient of this ragged_dot_general.
@jax.custom_vjp
def _of_contracted(left: jax.Array, right: jax.Array, sizes: jax.Array) -> jax.Array:
    dims = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())),
        lhs_ragged_dimensions=(0,),
        rhs_group_dimensions=(),
    )
    found = lax.ragged_dot_general(left, right, sizes, dims, **_exact(left))
    return found.astype(jnp.float32)


def _contracted_backward(saved: Any, ct: jax.Array) -> Any:
    left, right, sizes = saved
    if left.dtype == jnp.int8:
        return None, None, None
    return _of_rows(right, ct.swapaxes(1, 2), sizes), _of_rows(left, ct, sizes), None


_of_contracted.defvjp(lambda *given: (_of_contracted(*given), given), _contracted_backward)


def divided(
    config: GroupedConfig, side: Side, x: jax.Array, owners: jax.Array, sizes: jax.Array
) -> jax.Array:
    """Return a divided factor as [length, across], zero outside of groups."""
    length = config.length
    across = math.prod(side.shape) // max(length, 1)
    flat = x.reshape(length, across) if config.first(side) else as_rows(x, sizes, length)
    return only_owned(flat, owners, config.groups)


def matrices(config: GroupedConfig, x: jax.Array) -> jax.Array:
    """Return the rhs of groups of rows as [groups, k, n]."""
    side = config.right
    n = math.prod(side.kept_shape)
    if side.leading:
        return x.reshape(config.groups, side.k, n)
    return x.reshape(config.groups, n, side.k).swapaxes(1, 2)


def decoded(config: GroupedConfig, side: Side, x: jax.Array, scales: jax.Array) -> jax.Array:
    """Return a factor in float32, times its MX scales; int8 stays."""
    if config.mode.is_mx:
        by_group = side is config.right and config.rows
        shape, axis = (config.rhs_shape, side.boundary + 1) if by_group else (
            side.shape, side.boundary
        )  # fmt: skip
        wanted = config.scale_shapes[side is config.right]
        return numbers.decode(
            x.reshape(shape), scales.reshape(wanted), config.mode, axis, by_column=side.leading
        )
    return x if x.dtype == jnp.int8 else x.astype(jnp.float32)
