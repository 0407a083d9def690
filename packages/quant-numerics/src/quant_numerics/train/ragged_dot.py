"""Ragged contractions for training."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from quant_numerics.array.qarray import QArray, effective_scale
from quant_numerics.calibration.scale import Calibration
from quant_numerics.formats.dtypes import compute_dtype
from quant_numerics.formats.qtypes import get_qtype
from quant_numerics.ops.ragged_dot import RAGGED_DOT, group_of_rows, ragged_dot_general
from quant_numerics.train.cotangent import Cotangent, can_shift, unit_scaled
from quant_numerics.train.options import (
    Backward,
    HowToQuantize,
    check_backward,
    check_operands,
    hashable,
    result_dtype,
)
from quant_numerics.train.training_op import train

# lhs gradient (m, k): rows of the cotangent (m, n) by (g, k, n), over n.
_LHS_GRADIENT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((1,), (2,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[0],
)
# rhs gradient (g, k, n): (m, k) by (m, n), over the rows of each group.
_RHS_GRADIENT = lax.RaggedDotDimensionNumbers(
    dot_dimension_numbers=(((0,), (0,)), ((), ())),
    lhs_ragged_dimensions=[0],
    rhs_group_dimensions=[],
)


def train_ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    *,
    lhs_how: HowToQuantize | None,
    rhs_how: HowToQuantize | None,
    backward: Backward | None = None,
    lhs_calibration: Calibration | None = None,
    rhs_calibration: Calibration | None = None,
    key: jax.Array | None = None,
    weight: int | None = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Any = None,
) -> jax.Array:
    """Contract ragged operands that are quantized on the way, with derivatives.

    Operands are quantized as by ``quantize_for_dot``: per row of `lhs`, and per group and column
    of `rhs`. Derivatives are those of ``train_dot_general``, whose arguments these are. The
    gradient of `rhs` sums over the rows of each group, which can have no tiles: of `backward`,
    ``weight_grad_tile_size`` is refused, and formats with blocks are, too.
    """
    hows, calibrations = (lhs_how, rhs_how), (lhs_calibration, rhs_calibration)
    operands = check_operands((lhs, rhs), hows, calibrations)
    check_backward(backward, key, weight)
    if backward is not None and (
        backward.weight_grad_tile_size is not None or get_qtype(backward.qtype).block is not None
    ):
        raise ValueError(
            "what the backward pass of a ragged dot sums over, the rows of each group, must have "
            f"no tiles, got {backward}. Use a qtype without blocks and weight_grad_tile_size=None."
        )
    if group_offset is not None:
        raise NotImplementedError(
            f"group_offset of a training op must be None, got {group_offset!r}. Slice the rows and "
            "matrices of the groups instead."
        )
    op = RaggedOp(hashable(precision), result_dtype(preferred_element_type))
    group_sizes = jnp.asarray(group_sizes)
    return _train_ragged(op, hows, backward, weight, operands, calibrations, key, group_sizes)


@functools.partial(jax.jit, static_argnums=(0, 1, 2, 3))
def _train_ragged(op, hows, backward, weight, operands, calibrations, key, sizes):
    return train(op, hows, backward, weight, operands, calibrations, key, sizes)


@dataclasses.dataclass(frozen=True)
class RaggedOp:
    """Describe a ragged_dot; see ``TrainingOp``."""

    precision: Any
    preferred: Any

    def slices(
        self, side: int, x: jax.Array, how: HowToQuantize
    ) -> tuple[Sequence[int], dict[int, int | float]]:
        tile = get_qtype(how.qtype).block if how.tile_size is None else how.tile_size
        channels = ((0,), (0, 2))[side] if how.channelwise else ()
        return channels, {} if tile is None else {1: tile}

    def run(self, lhs: Any, rhs: Any, aux: Any) -> jax.Array:
        return ragged_dot_general(
            lhs,
            rhs,
            aux,
            RAGGED_DOT,
            precision=self.precision,
            preferred_element_type=self.preferred,
        )

    def gradient(self, side: int, g: jax.Array, residuals: Any, to: Cotangent) -> jax.Array:
        operands, sizes = residuals
        x, y = operands[side], operands[1 - side]
        other: QArray | jax.Array = y.value
        if y.quantized is not None:
            if can_shift(y.quantized, ((0, 2), (0,))[side]):
                other = unit_scaled(y.quantized)
                scale = effective_scale(y.quantized)  # (m, 1), or of rhs (g, 1, n)
                if side == 0:
                    scale = lax.squeeze(scale, (1,))
                    if scale.shape[0] > 1:
                        scale = scale.at[group_of_rows(sizes, g.shape[0])].get(
                            mode="promise_in_bounds"
                        )
                dtype = compute_dtype(g.dtype)
                g = g.astype(dtype) * scale.astype(dtype)
            else:
                other = to.requantize(y.value, ((0, 1), (1,))[side])
        quantized = to.quantize(g, (side,))
        if side == 0:
            pair, numbers = (quantized, other), _LHS_GRADIENT
        else:
            pair, numbers = (other, quantized), _RHS_GRADIENT
        return ragged_dot_general(
            *pair,
            sizes,
            numbers,
            precision=self.precision,
            preferred_element_type=x.value.dtype,
        )

    def batched(self, lhs: bool, rhs: bool) -> None:
        return None
