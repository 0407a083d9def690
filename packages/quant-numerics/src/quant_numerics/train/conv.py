"""Convolutions for training."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from quant_numerics.array.qarray import QArray
from quant_numerics.array.tiles import dot_granularity
from quant_numerics.calibration.scale import Calibration
from quant_numerics.formats.dtypes import compute_dtype
from quant_numerics.formats.qtypes import get_qtype
from quant_numerics.ops.conv import conv_general_dilated, lhs_scale, rhs_scale
from quant_numerics.ops.pointwise import is_pointwise
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
from quant_numerics.train.training_op import Residual, train


def train_conv_general_dilated(
    lhs: ArrayLike,
    rhs: ArrayLike,
    window_strides: Sequence[int],
    padding: str | Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int] | None = None,
    rhs_dilation: Sequence[int] | None = None,
    dimension_numbers: Any = None,
    feature_group_count: int = 1,
    batch_group_count: int = 1,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    *,
    lhs_how: HowToQuantize | None,
    rhs_how: HowToQuantize | None,
    backward: Backward | Backwards | None = None,
    lhs_calibration: Calibration | None = None,
    rhs_calibration: Calibration | None = None,
    cotangent_calibration: Calibration | None = None,
    key: jax.Array | None = None,
) -> jax.Array:
    """Quantize operands and convolve them, with derivatives.

    Operands are quantized as by ``quantize_for_conv``: per batch element of `lhs`, and per output
    feature of `rhs`. Derivatives are those of ``train_dot_general``: each gradient is one
    convolution of the quantized cotangent and the other operand's quantized values.

    Args:
      lhs: input, a bfloat16, float16, float32 or float64 array.
      rhs: kernel, the same.
      window_strides: as in ``conv_general_dilated``, like all arguments that are not listed here.
      padding: as there.
      lhs_dilation: as there.
      rhs_dilation: as there.
      dimension_numbers: as there.
      feature_group_count: as there.
      batch_group_count: as there.
      precision: as there.
      preferred_element_type: as there.
      out_sharding: as there.
      lhs_how: as in ``train_dot_general``, like the arguments after it.
      rhs_how: as there.
      backward: as there.
      lhs_calibration: as there.
      rhs_calibration: as there.
      cotangent_calibration: as there.
      key: as there.

    Raises:
      TypeError: an operand that is not a float array.
      ValueError: as ``conv_general_dilated``; tiles, or a format with blocks; stochastic rounding
        without a key.
    """
    hows, calibrations = (lhs_how, rhs_how), (lhs_calibration, rhs_calibration)
    operands = check_operands((lhs, rhs), hows, calibrations)
    gradients = both_gradients(backward, key, cotangent_calibration)
    numbers = lax.conv_dimension_numbers(operands[0].shape, operands[1].shape, dimension_numbers)
    # A float input takes any scales of the kernel, which is dequantized for it.
    strict = [how for how in hows if how is not None] if lhs_how is not None else []
    pointwise = is_pointwise(
        operands[1].shape,
        numbers,
        padding=padding,
        lhs_dilation=lhs_dilation,
        feature_group_count=feature_group_count,
        batch_group_count=batch_group_count,
    )
    sizes = [how.tile_size for how in strict if how is lhs_how or not pointwise]
    qtypes = [how.qtype for how in strict]
    has_tiles = any(one is not None and one.has_tiles for one in gradients or ())
    has_tiles = has_tiles or any(size is not None for size in sizes)
    if has_tiles or any(get_qtype(q).block for q in qtypes):
        raise ValueError(
            "the formats of a convolution must have no tiles or blocks, but for the kernel of a "
            "float input, and tiles of a pointwise kernel, got "
            f"{hows} and {backward}. Use a qtype without blocks and no tile sizes."
        )
    if not isinstance(padding, str):
        padding = tuple((int(low), int(high)) for low, high in padding)
    op = ConvOp(
        numbers,
        tuple(map(int, window_strides)),
        padding,
        None if lhs_dilation is None else tuple(map(int, lhs_dilation)),
        None if rhs_dilation is None else tuple(map(int, rhs_dilation)),
        int(feature_group_count),
        int(batch_group_count),
        hashable(precision),
        result_dtype(preferred_element_type),
        out_sharding,
    )
    return train(op, hows, gradients, operands, calibrations, key, None, cotangent_calibration)


@dataclasses.dataclass(frozen=True)
class ConvOp:
    """A conv_general_dilated without its operands; see ``TrainingOp``."""

    numbers: lax.ConvDimensionNumbers
    window_strides: tuple[int, ...]
    padding: Any
    lhs_dilation: tuple[int, ...] | None
    rhs_dilation: tuple[int, ...] | None
    feature_group_count: int
    batch_group_count: int
    precision: Any
    preferred: Any
    out_sharding: Any = None

    def slices(
        self, side: int, x: jax.Array, how: HowToQuantize
    ) -> tuple[Sequence[int], dict[int, int]]:
        tile = get_qtype(how.qtype).block if how.tile_size is None else how.tile_size
        summed = [a for a in range(x.ndim) if a != self._specs[side][0]]
        return dot_granularity(x.shape, summed, tile, how.channelwise)

    @property
    def _specs(self) -> tuple[Sequence[int], Sequence[int]]:
        return self.numbers.lhs_spec, self.numbers.rhs_spec

    def run(self, lhs: Any, rhs: Any, aux: Any) -> jax.Array:
        return conv_general_dilated(
            lhs,
            rhs,
            self.window_strides,
            self.padding,
            self.lhs_dilation,
            self.rhs_dilation,
            self.numbers,
            self.feature_group_count,
            self.batch_group_count,
            self.precision,
            self.preferred,
            self.out_sharding,
        )

    def gradient(self, side: int, g: jax.Array, residuals: Any, to: Cotangent) -> jax.Array:
        operands, _ = residuals
        x, y = operands[side], operands[1 - side]
        other: QArray | jax.Array = y.value
        if y.quantized is not None and can_shift(y.quantized, (self._specs[1 - side][0],)):
            other, q = to.taken_from(y.quantized)
            if side == 0:
                scale = rhs_scale(q, self.numbers, g.ndim)
            else:
                scale = lhs_scale(q, self.numbers, g.shape, self.batch_group_count)
            dtype = compute_dtype(g.dtype)
            g = g.astype(dtype) * scale.astype(dtype)
        return self._transposed(side, g, other, y.quantized is not None, x, to)

    def _transposed(
        self,
        side: int,
        g: jax.Array,
        other: QArray | jax.Array,
        quantized: bool,
        x: Residual,
        to: Cotangent,
    ) -> jax.Array:
        """Run the transpose that JAX has for the float convolution, quantized.

        It consists of moves of the other operand, one convolution, and moves of the result.
        """
        shape = other.shape
        float_op = dataclasses.replace(self, preferred=None, out_sharding=None)

        def transposed(g: jax.Array, y: jax.Array) -> jax.Array:
            like = jax.ShapeDtypeStruct(x.value.shape, jnp.float32)

            def forward(x: jax.Array) -> jax.Array:
                return float_op.run(*((x, y) if side == 0 else (y, x)), None)

            return jax.linear_transpose(forward, like)(g)[0]

        structs = [jax.ShapeDtypeStruct(s, jnp.float32) for s in (g.shape, shape)]
        jaxpr = jax.make_jaxpr(transposed)(*structs).jaxpr
        of_g, of_y = jaxpr.invars
        dtype = x.value.dtype
        values: dict[Any, Any] = {of_g: g}
        values[of_y] = other.qvalue if isinstance(other, QArray) else other
        for eqn in jaxpr.eqns:
            if eqn.primitive is not lax.conv_general_dilated_p:
                (operand,) = eqn.invars
                bind_params = eqn.primitive.get_bind_params(eqn.params)
                values[eqn.outvars[0]] = eqn.primitive.bind(values[operand], **bind_params)
                continue
            numbers = eqn.params["dimension_numbers"]
            pair = []
            for var, spec in zip(eqn.invars, (numbers.lhs_spec, numbers.rhs_spec), strict=True):
                value = values[var]
                if var is of_g:
                    value = to.quantize(value, (spec[0],))
                elif isinstance(other, QArray):
                    scale = other.scale.reshape((1,) * value.ndim)
                    value = QArray(value, scale, qtype=other.qtype, dtype=other.dtype)
                elif quantized:
                    value = to.requantize(value, (spec[0],))
                else:
                    value = to.residual(value, (spec[0],))
                pair.append(value)
            values[eqn.outvars[0]] = conv_general_dilated(
                pair[0],
                pair[1],
                dimension_numbers=numbers,
                precision=self.precision,
                preferred_element_type=dtype,
                **{name: eqn.params[name] for name in _CONV_PARAMS},
            )
        return values[jaxpr.outvars[0]]

    def batched(self, lhs: bool, rhs: bool) -> tuple[MergedConvOp, int] | None:
        if rhs or self.batch_group_count > 1 or self.out_sharding is not None:
            return None
        return MergedConvOp(self), 0


@dataclasses.dataclass(frozen=True)
class MergedConvOp:
    """A batch of inputs and one kernel, convolved as one convolution."""

    op: ConvOp

    def run(self, lhs: Any, rhs: Any, aux: Any) -> jax.Array:
        size = lhs.shape[0]
        out = self.op.run(_merged(lhs, self.op.numbers.lhs_spec[0]), rhs, aux)
        return _split(out, self.op.numbers.out_spec[0], size)

    def gradient(self, side: int, g: jax.Array, residuals: Any, to: Cotangent) -> jax.Array:
        (left, right), aux = residuals
        batch, out_batch = self.op.numbers.lhs_spec[0], self.op.numbers.out_spec[0]
        left = Residual(
            _merged(left.value, batch),
            None if left.quantized is None else _merged(left.quantized, batch),
            None,
        )
        grad = self.op.gradient(side, _merged(g, out_batch), ((left, right), aux), to)
        return _split(grad, batch, g.shape[0]) if side == 0 else grad

    def batched(self, lhs: bool, rhs: bool) -> None:
        return None


_CONV_PARAMS = (
    "window_strides",
    "padding",
    "lhs_dilation",
    "rhs_dilation",
    "feature_group_count",
    "batch_group_count",
)


def _merged(x: Any, axis: int) -> Any:
    """Merge axis 0 into the axis that is `axis` without axis 0."""
    if isinstance(x, QArray):
        both = (x.shape[0], x.shape[axis + 1])
        parts: list[Any] = [x.scale, x.zero_point]
        if any(x.scale.shape[a] > 1 for a in (0, axis + 1)):
            for i, part in enumerate(parts):
                if part is not None:
                    shape = list(part.shape)
                    shape[0], shape[axis + 1] = both
                    parts[i] = jnp.broadcast_to(part, shape)
        scale: Any = _merged(parts[0], axis)
        point = None if parts[1] is None else _merged(parts[1], axis)
        return QArray(_merged(x.qvalue, axis), scale, point, qtype=x.qtype, dtype=x.dtype)
    x = jnp.moveaxis(x, 0, axis)
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _split(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Split what `_merged` merged."""
    inner = x.shape[axis] // max(size, 1)
    return jnp.moveaxis(x.reshape(*x.shape[:axis], size, inner, *x.shape[axis + 1 :]), axis, 0)
