"""Ragged matmuls: rows in groups, each group with one matrix."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from quant_numerics.array.qarray import effective_scale
from quant_numerics.contraction.base import Contraction, Residual, Side
from quant_numerics.contraction.cotangent import Cotangent, can_shift
from quant_numerics.contraction.options import Backwards, Hows, float_operands
from quant_numerics.formats.qtypes import compute_dtype
from quant_numerics.ops.dot import DotDimensionNumbers
from quant_numerics.ops.ragged_dot import (
    RAGGED_DOT,
    group_of_rows,
    in_groups,
    ragged_dot_general,
    window,
)

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


@dataclasses.dataclass(frozen=True)
class RaggedMatmul(Contraction):
    """``ragged_dot_general``; its other array holds the sizes of groups.

    ``train`` also takes the number of the group that ``rhs[0]`` belongs to, as ``ragged_dot`` does
    by ``group_offset``. The gradient of `rhs` sums over the rows of each group, which can have no
    tiles: a tile size, or a format with blocks, is for the gradient of `lhs` alone.

    Attributes:
      numbers: the dimension numbers; those of ``ragged_dot`` by default, which alone train.
    """

    numbers: lax.RaggedDotDimensionNumbers = RAGGED_DOT

    @property
    def dims(self) -> DotDimensionNumbers:
        """Return the contracted and the batch axes of both operands."""
        return self.numbers.dot_dimension_numbers

    @property
    def trains(self) -> bool:
        return self.numbers == RAGGED_DOT

    def shared(self, side: int, ndim: int) -> tuple[int, ...]:
        return self.dims[0][side]  # type: ignore[return-value]

    def run(self, lhs: Side, rhs: Side, *extras: Any) -> jax.Array:
        (sizes,) = extras
        return ragged_dot_general(
            lhs,
            rhs,
            sizes,
            self.numbers,
            precision=self.precision,
            preferred_element_type=self.preferred_element_type,
        )

    def check_training(
        self, operands: Sequence[jax.Array], hows: Hows, backward: Backwards | None
    ) -> None:
        super().check_training(operands, hows, backward)
        of_rhs = None if backward is None else backward[1]
        if of_rhs is not None and of_rhs.has_tiles:
            raise ValueError(
                "the gradient of rhs of a ragged dot, a sum over the rows of each group, must have "
                f"no tiles, got {of_rhs}. Use a qtype without blocks and no tile size, or give "
                "backward a pair with another one for rhs."
            )

    def train(self, lhs: Any, rhs: Any, *extras: Any, **options: Any) -> jax.Array:
        sizes, *offset = map(jnp.asarray, extras)
        if not offset:
            return super().train(lhs, rhs, sizes, **options)
        left, right = float_operands(lhs, rhs)
        start, sizes = window(sizes, offset[0], right.shape[0])

        def first(x: jax.Array) -> jax.Array:
            # The rows before the first group go behind all others.
            return jnp.roll(x, -start, 0) if x.ndim and x.shape[0] > 1 else x

        options["lhs_calibration"] = jax.tree.map(first, options.get("lhs_calibration"))
        return jnp.roll(super().train(first(left), right, sizes, **options), start, 0)

    def gradient(
        self, side: int, g: jax.Array, operands: Sequence[Residual], to: Cotangent, *extras: Any
    ) -> jax.Array:
        (sizes,) = extras
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
        # Rows of no group would have a share in what others are rounded to.
        inside = lax.expand_dims(in_groups(sizes, g.shape[0]), (1,))
        g = lax.select(jnp.broadcast_to(inside, g.shape), g, lax.full_like(g, 0))
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
