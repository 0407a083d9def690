"""Matmuls: dot_general and einsum of two operands."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from opt_einsum import get_symbol

from quant_numerics.array.qarray import QArray, effective_scale
from quant_numerics.array.tiles import placed
from quant_numerics.contraction.base import Contraction, Residual, Side
from quant_numerics.contraction.cotangent import Cotangent, can_shift
from quant_numerics.contraction.options import float_operands
from quant_numerics.ops.arithmetic import output_dtype
from quant_numerics.ops.dot import DotDimensionNumbers, dot_general
from quant_numerics.ops.einsum import (
    as_dot,
    before_transpose,
    check_sizes,
    diagonals,
    einsum,
    parse,
)


@dataclasses.dataclass(frozen=True)
class Matmul(Contraction):
    """``dot_general``, or an einsum of two operands if it has a spec.

    Attributes:
      dims: ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``, not negative; of an
        einsum what ``einsum_dimension_numbers`` returns.
      spec: the subscripts of an einsum, or None.
      out_sharding: sharding of the result, as in ``dot_general``.
    """

    dims: DotDimensionNumbers
    spec: str | None = None
    out_sharding: Any = dataclasses.field(default=None, kw_only=True)

    @property
    def _options(self) -> dict[str, Any]:
        return {
            "precision": self.precision,
            "preferred_element_type": self.preferred_element_type,
            "out_sharding": self.out_sharding,
        }

    def labels(self, lhs_ndim: int, rhs_ndim: int) -> tuple[str, str, str]:
        """Return a letter for each axis of lhs, rhs and the result, as in an einsum."""
        if self.spec is not None:
            (left, right), out = parse(self.spec, (lhs_ndim, rhs_ndim))
            return left, right, out
        (lc, rc), (lb, rb) = self.dims
        pool = map(get_symbol, range(lhs_ndim + rhs_ndim))
        left = "".join(next(pool) for _ in range(lhs_ndim))
        same = dict(zip((*rc, *rb), (*lc, *lb), strict=True))
        right = "".join(left[same[a]] if a in same else next(pool) for a in range(rhs_ndim))
        batch, summed = ("".join(left[a] for a in axes) for axes in (lb, lc))
        return left, right, batch + "".join(c for c in left + right if c not in batch + summed)

    def shared(self, side: int, ndim: int) -> tuple[int, ...]:
        return self.dims[0][side]  # type: ignore[return-value]

    def run(self, lhs: Side, rhs: Side, *extras: Any) -> jax.Array:
        if self.spec is not None:
            return einsum(self.spec, lhs, rhs, **self._options)
        return dot_general(lhs, rhs, self.dims, **self._options)

    def train(self, lhs: Any, rhs: Any, *extras: Any, **options: Any) -> jax.Array:
        if self.spec is None:
            return super().train(lhs, rhs, **options)
        # An einsum is one matmul and a transpose. What one operand alone sums, and the diagonal of
        # a label that it has twice, is taken before it is quantized.
        operands = float_operands(lhs, rhs)
        terms, out = parse(self.spec, [x.ndim for x in operands])
        check_sizes(self.spec, operands, terms)
        left, right = map(diagonals, operands, terms)
        *pair, dims, order = as_dot(left, right, out)
        for name, given, taken in zip(("lhs", "rhs"), operands, pair, strict=True):
            if options.get(f"{name}_calibration") is not None and given.ndim != taken.ndim:
                raise ValueError(
                    f"axes of {name} must be contracted or kept where {name}_calibration is given, "
                    f"got einsum {self.spec!r}. Sum them before, and measure the range of that."
                )
            if given.ndim != taken.ndim:  # the quantized values are of what is not contracted
                options[f"{name}_quantized"] = None
        op = Matmul(
            dims,
            precision=self.precision,
            preferred_element_type=output_dtype(*operands, self.preferred_element_type),
            out_sharding=before_transpose(self.out_sharding, order),
        )
        result = op.train(*pair, **options)
        return result if order == sorted(order) else result.transpose(order)

    def gradient(
        self, side: int, g: jax.Array, operands: Sequence[Residual], to: Cotangent, *extras: Any
    ) -> jax.Array:
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
        return other, placed(effective_scale(scales), dict(zip(axes, g_axes, strict=True)), g.ndim)

    def batched(self, lhs: bool, rhs: bool, lhs_ndim: int) -> tuple[Matmul, int] | None:
        if self.out_sharding is not None:
            return None
        (lc, rc), (lb, rb) = self.dims
        # The result's axes are batch, free of lhs, free of rhs.
        out_axis = len(lb) + (0 if lhs else lhs_ndim - len(lc) - len(lb))
        lc, lb = (tuple(a + lhs for a in axes) for axes in (lc, lb))
        rc, rb = (tuple(a + rhs for a in axes) for axes in (rc, rb))
        if lhs and rhs:
            lb, rb, out_axis = (0, *lb), (0, *rb), 0
        return dataclasses.replace(self, dims=((lc, rc), (lb, rb))), out_axis
