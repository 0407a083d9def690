"""How grouped_gemm_v2 is partitioned: each device has some columns, or some groups."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from ..matmul.sides import Side
from ..partition import Spec, axes_in, partitioned, spec_of
from ..quantize.modes import ScalingMode
from .config import GroupedConfig


def partition_grouped(
    config: GroupedConfig, block: Callable[..., Any], *operands: jax.Array
) -> Callable[..., Any]:
    """Return a grouped_gemm_v2 that can be partitioned along axes of its matrices.

    These are the kept axes of rhs, and those of lhs if the contracted axis is divided. Groups of
    rhs are shared out, too: each device multiplies the rows of its groups, and the results are
    summed over devices. The axis that is divided is gathered, and so is what is contracted.

    Args:
        config: config of the whole matmul.
        block: called as ``block(config, *operands)``.
        operands: operands of the whole matmul.
    """
    left, right, rows = config.left, config.right, config.rows
    # Axes that can be shared out: of lhs, and of rhs with its groups before them.
    left_kept = () if rows else left.kept
    right_kept = tuple(i + 1 for i in right.kept) if rows else right.kept

    def specs(arguments: Any) -> tuple[list[Spec], list[Spec]]:
        a = spec_of(arguments[0], left_kept)
        b = _without(spec_of(arguments[2], right_kept), a)
        g = _without(spec_of(arguments[2], (0,)), b) if rows else (None,)
        return _laid_out(config, arguments, a, b, g, None)

    def on_device(given: Sequence[Spec], _: Any) -> Callable[..., Any]:
        axes = given[2][0] if rows else None
        over = (axes,) if isinstance(axes, str) else tuple(axes or ())

        def run(*operands: jax.Array) -> jax.Array:
            here = config.block(operands[0].shape, operands[2].shape)
            if not over:
                return block(here, *operands)
            return _own_groups(config, here, block, over, *operands)

        return run

    a = [f"a{i}" for i in range(len(left_kept))]
    b = [f"b{i}" for i in range(len(right_kept))]
    given, found = _laid_out(config, operands, a, b, ["g"] if rows else [None], "w")
    names = {name for one in (*given, *found) for name in one}
    run = functools.partial(block, config)
    return partitioned(run, specs, given, found, names - {*a, *b, "g"}, on_device=on_device)


def _own_groups(
    config: GroupedConfig,
    here: GroupedConfig,
    block: Callable[..., Any],
    over: tuple[str, ...],
    *operands: jax.Array,
) -> jax.Array:
    """Return the whole result, from the groups that each device has."""
    lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, sizes, alpha, beta = operands
    first = lax.axis_index(over) * here.groups
    # Rows of earlier groups go to the end, where no group is.
    start = jnp.sum(jnp.where(jnp.arange(config.groups) < first, sizes, 0))
    own = lax.dynamic_slice_in_dim(sizes, first, here.groups)

    def moved(x: jax.Array) -> jax.Array:
        across = x.size // max(config.length, 1)
        return jnp.roll(x.reshape(-1), -start * across).reshape(x.shape)

    lhs = moved(lhs)
    if config.mode.is_mx or config.mode is ScalingMode.CHANNEL_SCALING:
        lhs_scale_inv = moved(lhs_scale_inv)
    elif config.mode.is_tensor:
        lhs_scale_inv = lax.dynamic_slice_in_dim(lhs_scale_inv, first, here.groups)
    found = block(here, lhs, lhs_scale_inv, rhs, rhs_scale_inv, bias, own, alpha, beta)
    return lax.psum(jnp.roll(found, start, axis=0), over)


def _without(spec: Sequence[Any], taken: Sequence[Any]) -> tuple[Any, ...]:
    """Return a spec without the mesh axes that are taken."""
    return tuple(None if axes_in((axes,)) & axes_in(taken) else axes for axes in spec)


def _laid_out(
    config: GroupedConfig,
    operands: Sequence[Any],
    a: Sequence[Any],
    b: Sequence[Any],
    g: Sequence[Any],
    whole: str | None,
) -> tuple[list[tuple[Any, ...]], list[tuple[Any, ...]]]:
    """Return what belongs to the axes of operands and of the result.

    Args:
        config: config of the whole matmul.
        operands: operands of the whole matmul.
        a: what belongs to the kept axes of lhs, unless these are divided.
        b: what belongs to the kept axes of rhs.
        g: what belongs to the groups of rhs.
        whole: begins the names of axes that each device has all of; None for None.
    """
    count = 0

    def rest(number: int = 1) -> tuple[Any, ...]:
        nonlocal count
        count += number
        return tuple(None if whole is None else f"{whole}{i}" for i in range(count - number, count))

    left, right, rows = config.left, config.right, config.rows
    a = [*rest(1)] if rows else [*a]

    def axes_of(side: Side, kept: Sequence[Any]) -> list[Any]:
        of_axis = dict(zip(side.kept, kept, strict=True))
        return [of_axis[i] if i in of_axis else rest()[0] for i in range(len(side.shape))]

    lhs, rhs = axes_of(left, a), axes_of(right, b)
    groups = [*g] if rows else [*rest()]
    scales: list[tuple[Any, ...]] = []
    for side, axes, kept, by_group in (
        (left, lhs, a, [] if rows else groups),
        (right, rhs, b, groups),
    ):
        given = operands[1 if side is left else 3]
        if config.mode is ScalingMode.CHANNEL_SCALING:
            found = (*by_group, *kept)
        elif config.mode.is_mx:
            at = side.boundary - 1 if side.leading else len(side.shape) - 1
            wide = [rest()[0] if i == at else name for i, name in enumerate(axes)]
            found = (*(groups if side is right and rows else ()), *wide)
        elif config.mode.is_tensor and side is right and rows:
            found = (*groups,)
        else:
            found = rest(len(given.shape))
        scales.append(found)
    bias = (*groups, *b) if config.has_bias else rest(len(operands[4].shape))
    factors = (*groups,) if rows else rest()
    given = [
        (*lhs,), scales[0], (*groups, *rhs) if rows else (*rhs,), scales[1], bias, rest(),
        factors, factors,
    ]  # fmt: skip
    return given, [(*a, *b) if rows else (*groups, *a, *b)]
