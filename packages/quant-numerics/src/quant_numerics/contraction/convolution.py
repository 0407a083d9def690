"""Convolutions."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from quant_numerics.array.qarray import QArray
from quant_numerics.array.tiles import dot_granularity
from quant_numerics.contraction.base import Contraction, Residual, Side
from quant_numerics.contraction.cotangent import Cotangent, can_shift
from quant_numerics.contraction.options import Backwards, Hows, HowToQuantize
from quant_numerics.formats.qtypes import compute_dtype, get_qtype
from quant_numerics.ops.conv import conv_general_dilated, is_pointwise, lhs_scale, rhs_scale


@dataclasses.dataclass(frozen=True)
class Convolution(Contraction):
    """``conv_general_dilated``.

    The input has one scale per batch element, and the kernel per output feature. The kernel may
    have tiles if the input is float, or if the convolution is a matmul (``is_pointwise``). A tile
    size for the input is left out.

    Attributes:
      numbers: the dimension numbers. All other attributes are as in ``conv_general_dilated``.
    """

    numbers: lax.ConvDimensionNumbers
    window_strides: tuple[int, ...]
    padding: str | tuple[tuple[int, int], ...]
    lhs_dilation: tuple[int, ...] | None = None
    rhs_dilation: tuple[int, ...] | None = None
    feature_group_count: int = 1
    batch_group_count: int = 1
    out_sharding: Any = dataclasses.field(default=None, kw_only=True)

    @property
    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``conv_general_dilated`` after the operands, but for numbers."""
        fields = (field.name for field in dataclasses.fields(self))
        return {name: getattr(self, name) for name in fields if name != "numbers"}

    @property
    def _specs(self) -> tuple[Sequence[int], Sequence[int]]:
        return self.numbers.lhs_spec, self.numbers.rhs_spec

    def is_pointwise(self, kernel_shape: Sequence[int]) -> bool:
        """Return whether it is a matmul over input features, at some places of the input."""
        return is_pointwise(kernel_shape, self.numbers, **self.arguments)

    def takes_tiles(self, side: int, shape: Sequence[int]) -> bool:
        return side == 1 and self.is_pointwise(shape)

    def shared(self, side: int, ndim: int) -> tuple[int, ...]:
        return tuple(axis for axis in range(ndim) if axis != self._specs[side][0])

    def tiled_sizes(
        self, shapes: Sequence[tuple[int, ...]], hows: Sequence[HowToQuantize | None]
    ) -> tuple[int, ...]:
        kernel = shapes[1]
        # Formats with blocks want them in both operands, and the input has none.
        blocks = any(how is not None and get_qtype(how.qtype).block for how in hows)
        if hows[0] is not None and (blocks or not self.takes_tiles(1, kernel)):
            return ()
        return tuple(kernel[axis] for axis in self.shared(1, len(kernel)))

    def sparse_axis(self, side: int, ndim: int) -> int | None:
        return self._specs[side][1]

    def granularity(
        self, side: int, shape: tuple[int, ...], how: HowToQuantize
    ) -> tuple[Sequence[int], dict[int, int]]:
        if side == 1:
            return super().granularity(side, shape, how)
        return dot_granularity(shape, self.shared(side, len(shape)), None, how.channelwise)

    def run(self, lhs: Side, rhs: Side, *extras: Any) -> jax.Array:
        return conv_general_dilated(lhs, rhs, dimension_numbers=self.numbers, **self.arguments)

    def check_training(
        self, operands: Sequence[jax.Array], hows: Hows, backward: Backwards | None
    ) -> None:
        lhs_how, rhs_how = hows
        tiled = any(one is not None and one.has_tiles for one in backward or ())
        # A float input takes any scales of the kernel, which is dequantized for it.
        if lhs_how is not None:
            tiled |= any(how is not None and get_qtype(how.qtype).block for how in hows)
            if rhs_how is not None and rhs_how.tile_size is not None:
                tiled |= not self.is_pointwise(operands[1].shape)
        if tiled:
            raise ValueError(
                "the formats of a convolution must have no tiles or blocks, but for the kernel of "
                "a float input, and tiles of a pointwise kernel, got "
                f"{hows} and {backward}. Use a qtype without blocks and no tile sizes."
            )

    def gradient(
        self, side: int, g: jax.Array, operands: Sequence[Residual], to: Cotangent, *extras: Any
    ) -> jax.Array:
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
        if 0 in (*g.shape, *shape, *x.value.shape):  # JAX's transpose would have no convolution
            return jnp.zeros(x.value.shape, x.value.dtype)
        float_op = dataclasses.replace(self, preferred_element_type=None, out_sharding=None)

        def transposed(g: jax.Array, y: jax.Array) -> jax.Array:
            like = jax.ShapeDtypeStruct(x.value.shape, jnp.float32)

            def forward(x: jax.Array) -> jax.Array:
                return float_op.run(*((x, y) if side == 0 else (y, x)))

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

    def batched(self, lhs: bool, rhs: bool, lhs_ndim: int) -> tuple[_Merged, int] | None:
        if rhs or self.batch_group_count > 1 or self.out_sharding is not None:
            return None
        return _Merged(self), 0


@dataclasses.dataclass(frozen=True)
class _Merged:
    """A batch of inputs and one kernel, convolved as one convolution."""

    op: Convolution

    def run(self, lhs: Any, rhs: Any) -> jax.Array:
        size = lhs.shape[0]
        out = self.op.run(_merged(lhs, self.op.numbers.lhs_spec[0]), rhs)
        return _split(out, self.op.numbers.out_spec[0], size)

    def gradient(
        self, side: int, g: jax.Array, operands: Sequence[Residual], to: Cotangent
    ) -> jax.Array:
        left, right = operands
        batch, out_batch = self.op.numbers.lhs_spec[0], self.op.numbers.out_spec[0]
        left = Residual(
            _merged(left.value, batch),
            None if left.quantized is None else _merged(left.quantized, batch),
            None,
        )
        grad = self.op.gradient(side, _merged(g, out_batch), (left, right), to)
        return _split(grad, batch, g.shape[0]) if side == 0 else grad

    def batched(self, lhs: bool, rhs: bool, lhs_ndim: int) -> None:
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
