"""How gemm_v2 is partitioned: each device calls the kernel on its block."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax

from ..partition import Spec, axes_in, partitioned, spec_of
from ..quantize.modes import ScalingMode
from .config import GemmConfig


def partition_gemm(
    config: GemmConfig, block: Callable[..., Any], *operands: jax.Array
) -> Callable[..., Any]:
    """Return a gemm_v2 that can be partitioned along kept axes.

    What is contracted is gathered.

    Args:
        config: config of the whole matmul.
        block: called as ``block(config, *operands)``.
        operands: operands of the whole matmul.
    """
    left, right, mode = config.left, config.right, config.mode

    def on_block(*operands: jax.Array) -> Any:
        return block(config.block(operands[0].shape, operands[2].shape), *operands)

    def specs(arguments: Any) -> tuple[list[Spec], list[Spec]]:
        rows = spec_of(arguments[0], left.kept)
        columns = tuple(
            None if axes_in((axes,)) & axes_in(rows) else axes
            for axes in spec_of(arguments[2], right.kept)
        )
        given: list[Spec] = []
        for argument, side, kept in ((0, left, rows), (2, right, columns)):
            of_axis = dict(zip(side.kept, kept, strict=True))
            wide = tuple(of_axis.get(i) for i in range(len(side.shape)))
            given.append(wide)
            if mode.is_mx:
                given.append(wide)
            elif mode is ScalingMode.CHANNEL_SCALING:
                given.append(kept)
            else:
                given.append((None,) * len(arguments[argument + 1].shape))
        bias = columns if math.prod(arguments[4].shape) else (None,)
        return [*given, bias, (None,), (None,)], [(*rows, *columns)]

    a, b = ([f"{x}{i}" for i in range(len(side.kept))] for x, side in (("a", left), ("b", right)))
    axes: list[list[str]] = []
    for side, kept, letter in ((left, a, "k"), (right, b, "q")):
        of_axis = dict(zip(side.kept, kept, strict=True))
        axes.append([of_axis.get(i, f"{letter}{i}") for i in range(len(side.shape))])
        scales = [*axes[-1]]
        if mode.is_mx:
            scales[side.boundary - 1 if side.leading else -1] = f"{letter}s"
        elif mode is ScalingMode.CHANNEL_SCALING:
            scales = kept
        else:
            scales = [f"{letter}s"]
        axes.append(scales)
    axes += [b if config.has_bias else ["u"], ["v"], ["w"]]
    whole = {name for names in axes for name in names} - {*a, *b}
    return partitioned(on_block, specs, axes, [[*a, *b]], whole)
