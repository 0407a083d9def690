"""Ragged contractions for training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from quant_numerics.array.qarray import effective_scale
from quant_numerics.calibration.scale import Calibration
from quant_numerics.formats.dtypes import compute_dtype
from quant_numerics.formats.qtypes import get_qtype
from quant_numerics.ops.ragged_dot import RAGGED_DOT, group_of_rows, ragged_dot_general, window
from quant_numerics.train.cotangent import Cotangent, can_shift
from quant_numerics.train.options import (
    Backward,
    Backwards,
    HowToQuantize,
    both_gradients,
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
    backward: Backward | Backwards | None = None,
    lhs_calibration: Calibration | None = None,
    rhs_calibration: Calibration | None = None,
    cotangent_calibration: Calibration | None = None,
    key: jax.Array | None = None,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: Any = None,
) -> jax.Array:
    """Quantize ragged operands and contract them, with derivatives.

    Operands are quantized as by ``quantize_for_dot``: per row of `lhs`, and per group and column
    of `rhs`. Derivatives are those of ``train_dot_general``. The
    gradient of `rhs` sums over the rows of each group, which can have no tiles: a tile size, or a
    format with blocks, is for the gradient of `lhs` alone.

    Args:
      lhs: float array of shape (m, k).
      rhs: float array of shape (g, k, n).
      group_sizes: as in ``ragged_dot``.
      lhs_how: how `lhs` is quantized; None: it stays float.
      rhs_how: the same for `rhs`.
      backward: how the backward contractions are quantized; a pair for the gradients of `lhs` and
        of `rhs`; None: float.
      lhs_calibration: a range to use instead of measuring `lhs`, shaped like its scale.
      rhs_calibration: the same for `rhs`.
      cotangent_calibration: as in ``train_dot_general``.
      key: random key, for stochastic rounding.
      precision: for contractions of float arrays.
      preferred_element_type: dtype of the result.
      group_offset: as in ``ragged_dot``.

    Returns:
      Array of shape (m, n).

    Raises:
      TypeError: an operand that is not a float array.
      ValueError: tiles for the gradient of `rhs`; as ``ragged_dot``.
    """
    hows, calibrations = (lhs_how, rhs_how), (lhs_calibration, rhs_calibration)
    operands = check_operands((lhs, rhs), hows, calibrations)
    gradients = both_gradients(backward, key, cotangent_calibration)
    of_rhs = None if gradients is None else gradients[1]
    if of_rhs is not None and of_rhs.has_tiles:
        raise ValueError(
            "the gradient of rhs of a ragged dot, a sum over the rows of each group, must have no "
            f"tiles, got {of_rhs}. Use a qtype without blocks and no tile size, or give backward "
            "a pair with another one for rhs."
        )
    op = RaggedOp(hashable(precision), result_dtype(preferred_element_type))
    group_sizes = jnp.asarray(group_sizes)
    if group_offset is None:
        rest = key, group_sizes, cotangent_calibration
        return train(op, hows, gradients, operands, calibrations, *rest)
    start, group_sizes = window(group_sizes, group_offset, operands[1].shape[0])

    def first(x: jax.Array) -> jax.Array:
        # The rows before the first group go behind all others.
        return jnp.roll(x, -start, 0) if x.shape[0] > 1 else x

    operands = (first(operands[0]), operands[1])
    calibrations = (jax.tree.map(first, lhs_calibration), rhs_calibration)
    rest = key, group_sizes, cotangent_calibration
    y = train(op, hows, gradients, operands, calibrations, *rest)
    return jnp.roll(y, start, 0)


@dataclasses.dataclass(frozen=True)
class RaggedOp:
    """A ragged_dot without its operands; see ``TrainingOp``."""

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
        kept, contracted = (((0, 1), (2,)), ((1,), ()))[side]
        if y.quantized is None:
            other = to.residual(y.value, kept, contracted)
        else:
            if can_shift(y.quantized, ((0, 2), (0,))[side]):
                other, scales = to.taken_from(y.quantized)
                scale = effective_scale(scales)  # (m, 1), or of rhs (g, 1, n)
                if side == 0:
                    scale = lax.squeeze(scale, (1,))
                    if scale.shape[0] > 1:
                        scale = scale.at[group_of_rows(sizes, g.shape[0])].get(
                            mode="promise_in_bounds"
                        )
                dtype = compute_dtype(g.dtype)
                g = g.astype(dtype) * scale.astype(dtype)
            else:
                other = to.requantize(y.value, kept, contracted)
        quantized = to.quantize(g, (side,), ((1,), ())[side])
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
