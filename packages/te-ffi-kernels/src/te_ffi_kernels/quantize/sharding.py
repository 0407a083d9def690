"""How dbias_quantize is partitioned: each device calls the kernel on its block."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax import lax

from ..partition import Spec, axes_in, partitioned, spec_of
from .config import QuantizeConfig
from .modes import BLOCK, ScalingMode


def partition_quantize(
    config: QuantizeConfig, block: Callable[..., Any], *operands: jax.Array
) -> Callable[..., Any]:
    """Return a dbias_quantize that can be partitioned between scales.

    Per tensor these are all; with MXFP8 all but those whose blocks can't be shared out evenly; per
    channel, those before flatten_axis by row, and those from it by column. Sums of columns are
    summed over devices in x's dtype, as Transformer Engine does it.

    Args:
        config: config for the whole array.
        block: called as ``block(config, *operands)``.
        operands: operands for the whole array.
    """
    shape = operands[0].shape
    mode, axis, rank = config.scaling_mode, config.axis, len(shape)
    layout = config.q_layout
    fixed: set[int] = set()
    if mode is ScalingMode.CHANNEL_SCALING:
        fixed |= set(range(axis, rank)) if layout.has_rowwise else set()
        fixed |= set(range(axis)) if layout.has_colwise else set()
    blocked: set[int] = set()
    if mode.is_mx:
        blocked |= {rank - 1} if layout.has_rowwise else set()
        blocked |= {axis - 1} if layout.has_colwise else set()
    # Whatever the mesh, its axes divide the number of devices.
    uneven = {i for i in blocked if shape[i] // BLOCK % jax.device_count()}
    fixed, blocked = fixed | uneven, blocked - uneven
    on_block = functools.partial(block, config)

    def specs(arguments: Any) -> tuple[list[Spec], list[Spec]]:
        x = list(spec_of(arguments[0], range(rank)))
        x = [None if i in fixed else axes for i, axes in enumerate(x)]
        given = [tuple(x), *((None,) * len(other.shape) for other in arguments[1:])]
        return given, _results_of(config, x, [(None,)] * 7)

    def on_device(given: Sequence[Spec], _: Any) -> Callable[..., Any]:
        rows, everything = (tuple(sorted(axes_in(x))) for x in (given[0][:axis], given[0]))

        def run(*operands: jax.Array) -> Any:
            *first, amax, dbias, workspace = on_block(*operands)
            if everything and mode.is_tensor:
                amax = lax.pmax(amax, everything)
            if rows and config.is_dbias:
                dbias = lax.psum(dbias, rows)
            return (*first, amax, dbias, workspace)

        return run

    factors = [f"x{i}" for i in range(rank)]
    x = [f"({name} e{i})" if i in blocked else name for i, name in enumerate(factors)]
    found = _results_of(config, x, [[f"o{i}"] for i in range(7)])
    # Along an axis of blocks, scales have the number of blocks.
    if mode.is_mx and layout.has_rowwise:
        found[2] = [*x[:-1], factors[-1] if rank - 1 in blocked else "y0"]
    if mode.is_mx and layout.has_colwise:
        number = factors[axis - 1] if axis - 1 in blocked else "y1"
        found[3] = [*x[: axis - 1], number, *x[axis:]]
    given = [x, ["s"], ["m"], ["r"], ["p"], ["h", "g"]]
    sizes = {f"e{i}": BLOCK for i in blocked}
    names = {name for one in (*given, *found) for name in one if "(" not in name}
    whole = names.union(sizes) - {factors[i] for i in range(rank) if i not in fixed}
    return partitioned(on_block, specs, given, found, whole, sizes=sizes, on_device=on_device)


def _results_of(config: QuantizeConfig, x: Sequence[Any], otherwise: Sequence[Any]) -> list[Any]:
    """Return each result's entry for its axes, from x's."""
    mode, axis, layout = config.scaling_mode, config.axis, config.q_layout
    found = list(otherwise)
    channel = mode is ScalingMode.CHANNEL_SCALING
    if layout.has_rowwise:
        found[0] = (*x,)
        if mode.is_mx or channel:
            found[2] = (*x,) if mode.is_mx else (*x[:axis],)
    if layout.has_colwise:
        found[1] = (*x,) if mode.is_mx else (*x[axis:], *x[:axis])
        if mode.is_mx or channel:
            found[3] = (*x,) if mode.is_mx else (*x[axis:],)
    if config.is_dbias:
        found[5] = (*x[axis:],)
    return found
