"""Contractions for training: quantized forward, float or quantized backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from quant_numerics.array.qarray import QArray
from quant_numerics.array.tiles import dot_granularity
from quant_numerics.calibration.scale import Calibration
from quant_numerics.formats.qtypes import get_qtype
from quant_numerics.ops.dot import DotDimensionNumbers, dot_general
from quant_numerics.train.cotangent import Cotangent, can_shift, scales_along
from quant_numerics.train.options import (
    Backward,
    Backwards,
    HowToQuantize,
    both_gradients,
    check_operands,
    hashable,
    result_dtype,
)
from quant_numerics.train.training_op import Residual, train


def train_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: DotDimensionNumbers,
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
    out_sharding: Any = None,
) -> jax.Array:
    """Quantize operands and contract them, with derivatives.

    The value is ``dot_general(quantize_for_dot(lhs, ...), quantize_for_dot(rhs, ...))``, bit for
    bit. Of the derivatives, forward mode is always that of the float op at the operands
    (straight through, arXiv:1308.3432), and so is reverse mode without `backward`. With `backward`,
    each gradient is a contraction of quantized arrays:

    - the cotangent, quantized with one scale per index of the axes that the gradient keeps;
    - the other operand's quantized values from the forward pass. Its scales lie along axes that
      this contraction sums over. So they are multiplied into the cotangent before the cotangent is
      quantized, and the sum is over integers. An operand with tiles or zero points is quantized
      again, to the cotangent's format; a float one stays float. ``Backward.residual`` changes this.

    A gradient is zero where its operand lies outside of the range that it was clipped to: with
    calibration methods that cut off, and with a given calibration, unless ``HowToQuantize.masks``
    is False.

    Under vmap, an operand that is the same for all examples gets its gradient as one contraction
    over the whole batch, where the cotangent has one scale per column, not per column and example.

    Args:
      lhs: bfloat16, float16, float32 or float64 array.
      rhs: the same.
      dimension_numbers: as in ``lax.dot_general``.
      lhs_how: how `lhs` is quantized; None: it stays float.
      rhs_how: the same for `rhs`.
      backward: how the backward contractions are quantized; a pair for the gradients of `lhs` and
        of `rhs`; None: float.
      lhs_calibration: a range to use instead of measuring `lhs`, shaped like its scale.
      rhs_calibration: the same for `rhs`.
      cotangent_calibration: a range to use instead of measuring the cotangent, one for all of it:
        a symmetric one of shape (), whose `upper` is 0 for scale 1. What lies outside saturates.
      key: random key, for `backward` with stochastic rounding. The bits of the cotangent and the
        operand's side are mixed in, so one key is enough for all steps of a loop.
      precision: for contractions of float arrays.
      preferred_element_type: dtype of the result, as in ``dot_general``.
      out_sharding: sharding of the result, as in ``dot_general``.

    Returns:
      Array as ``dot_general`` returns it. Gradients have the operands' dtypes.

    Raises:
      TypeError: an operand that is not a float array.
      ValueError: as ``quantize_for_dot`` and ``dot_general``; stochastic rounding without a key; a
        cotangent's range where it has tiles, or where no gradient is quantized.
    """
    hows, calibrations = (lhs_how, rhs_how), (lhs_calibration, rhs_calibration)
    operands = check_operands((lhs, rhs), hows, calibrations)
    gradients = both_gradients(backward, key, cotangent_calibration)
    dims = _canonical(dimension_numbers, operands)
    op = DotOp(
        dims,
        _ndims(operands),
        hashable(precision),
        result_dtype(preferred_element_type),
        out_sharding,
    )
    if hows == (None, None) and gradients is None:
        return op.run(*operands, None)
    return train(op, hows, gradients, operands, calibrations, key, None, cotangent_calibration)


def _canonical(dims: DotDimensionNumbers, operands: Sequence[jax.Array]) -> DotDimensionNumbers:
    (lc, rc), (lb, rb) = dims
    left, right = operands

    def axes(given: Sequence[int], x: jax.Array) -> tuple[int, ...]:
        return tuple(int(a) % x.ndim if -x.ndim <= a < x.ndim else int(a) for a in given)

    return (axes(lc, left), axes(rc, right)), (axes(lb, left), axes(rb, right))


def _ndims(operands: Sequence[jax.Array]) -> tuple[int, int]:
    return operands[0].ndim, operands[1].ndim


@dataclasses.dataclass(frozen=True)
class DotOp:
    """A dot_general without its operands; see ``TrainingOp``."""

    dims: DotDimensionNumbers
    ndims: tuple[int, int]
    precision: Any
    preferred: Any
    out_sharding: Any = None

    def slices(
        self, side: int, x: jax.Array, how: HowToQuantize
    ) -> tuple[Sequence[int], dict[int, int]]:
        tile = get_qtype(how.qtype).block if how.tile_size is None else how.tile_size
        return dot_granularity(x.shape, self.dims[0][side], tile, how.channelwise)

    def run(self, lhs: Any, rhs: Any, aux: Any) -> jax.Array:
        return dot_general(
            lhs,
            rhs,
            self.dims,
            precision=self.precision,
            preferred_element_type=self.preferred,
            out_sharding=self.out_sharding,
        )

    def gradient(self, side: int, g: jax.Array, residuals: Any, to: Cotangent) -> jax.Array:
        operands, _ = residuals
        x, y = operands[side], operands[1 - side]
        (xc, yc), (xb, yb) = (pair if side == 0 else pair[::-1] for pair in self.dims)
        x_free = [a for a in range(x.value.ndim) if a not in {*xc, *xb}]
        y_free = [a for a in range(y.value.ndim) if a not in {*yc, *yb}]
        # The cotangent's axes: batch, free of lhs, free of rhs.
        n = len(xb)
        first, last = (x_free, y_free) if side == 0 else (y_free, x_free)
        left = range(n, n + len(first))
        right = range(n + len(first), n + len(first) + len(last))
        g_x, g_y = (left, right) if side == 0 else (right, left)

        other, factors = self._other(y, g, (*yb, *y_free), (*range(n), *g_y), to)
        quantized = to.quantize(g, (*range(n), *g_x), tuple(g_y), factors)
        # The result has the batch axes, then the free axes of its two operands: those of g are the
        # free axes of x, and those of y the contracted ones. g is on the side that x has in the
        # forward pass, because the result then mostly has the layout of x already.
        sides = [(quantized, tuple(g_y), tuple(range(n))), (other, tuple(y_free), tuple(yb))]
        order = sorted(range(len(yc)), key=yc.__getitem__)
        parts = [tuple(x_free), tuple(xc[i] for i in order)]
        if side == 1:
            sides, parts = sides[::-1], parts[::-1]
        axes = (*xb, *parts[0], *parts[1])
        result = dot_general(
            sides[0][0],
            sides[1][0],
            ((sides[0][1], sides[1][1]), (sides[0][2], sides[1][2])),
            precision=self.precision,
            preferred_element_type=x.value.dtype,
            out_sharding=_explicit_sharding(x.value, axes),
        )
        if axes == tuple(range(len(axes))):
            return result
        return lax.transpose(result, [axes.index(a) for a in range(len(axes))])

    def _other(
        self,
        y: Residual,
        g: jax.Array,
        axes: tuple[int, ...],
        g_axes: tuple[int, ...],
        to: Cotangent,
    ) -> tuple[jax.Array | QArray, jax.Array | None]:
        """Return the residual to contract, and its scales if `g` is to be multiplied with them.

        `axes` of `y` correspond to `g_axes` of `g`.
        """
        q, free = y.quantized, axes[len(self.dims[1][0]) :]
        kept = [a for a in range(y.value.ndim) if a not in free]
        if q is None:
            return to.residual(y.value, kept, free), None
        if not can_shift(q, axes):
            return to.requantize(y.value, kept, free), None
        other, scales = to.taken_from(q)
        return other, scales_along(g, scales, axes, g_axes)

    def batched(self, lhs: bool, rhs: bool) -> tuple[DotOp, int] | None:
        if self.out_sharding is not None:
            return None
        (lc, rc), (lb, rb) = self.dims
        lc, lb = (tuple(a + lhs for a in axes) for axes in (lc, lb))
        rc, rb = (tuple(a + rhs for a in axes) for axes in (rc, rb))
        ndims = (self.ndims[0] + lhs, self.ndims[1] + rhs)
        # The result's axes are batch, free of lhs, free of rhs.
        out_axis = len(lb) + (0 if lhs else self.ndims[0] - len(lc) - len(lb))
        if lhs and rhs:
            lb, rb, out_axis = (0, *lb), (0, *rb), 0
        return dataclasses.replace(self, dims=((lc, rc), (lb, rb)), ndims=ndims), out_axis


def _explicit_sharding(x: jax.Array, axes: Sequence[int]) -> PartitionSpec | None:
    """Return the explicit sharding of a gradient with transposed axes."""
    sharding = getattr(jax.typeof(x), "sharding", None)
    if not isinstance(sharding, NamedSharding):
        return None
    explicit = AxisType.Explicit in sharding.mesh.axis_types
    return PartitionSpec(*(sharding.spec[a] for a in axes)) if explicit else None
