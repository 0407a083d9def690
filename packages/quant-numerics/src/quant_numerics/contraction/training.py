"""Contractions of operands that each step quantizes: their residuals and derivatives."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from quant_numerics.array.explicit import sharded_like
from quant_numerics.array.qarray import QArray, dequantize
from quant_numerics.array.tiles import slices
from quant_numerics.autodiff.linear import Axis, LinearPair, with_tangent
from quant_numerics.calibration.calibrate import (
    Calibration,
    calibrate,
    inside,
    parse_calibration_method,
    scale_of,
)
from quant_numerics.calibration.quantize import quantize_with
from quant_numerics.contraction.cotangent import Cotangent, quantize_scaled, without_infinities
from quant_numerics.contraction.options import Backward, Backwards, Hows, HowToQuantize


class Residual(NamedTuple):
    """What the derivatives need of an operand.

    Attributes:
      value: the operand.
      quantized: the operand quantized, or None.
      inside: which elements lie in the calibrated range, or None for all.
    """

    value: jax.Array
    quantized: QArray | None
    inside: jax.Array | None


@dataclasses.dataclass(frozen=True)
class TrainingPair(LinearPair):
    """The derivative of a contraction: float forward, quantized (or float) backward."""

    op: Any  # a Contraction, or one of a batch
    lhs_ndim: int
    backward: Backwards | None
    key_impl: Any = None
    unmapped: tuple[bool, bool] = (False, False)
    """Whether the scales of a side lack a leading axis that its quantized values have."""

    def apply(self, turned: bool, residuals: Any, tangent: Any) -> Any:
        sides, key, extras, upper = residuals
        values = [side.value for side in sides]
        if not turned:
            lhs, rhs = map(_masked, tangent, sides)
            return lax.add(
                self.op.run(lhs, values[1], *extras), self.op.run(values[0], rhs, *extras)
            )
        g = tangent
        grads: list[Any] = [None, None]
        full = tuple(map(_with_all_axes, sides))
        floats = [one is None or one.qtype is None for one in self.backward or (None, None)]
        if any(floats):
            # A gradient that is float is that of the float op: at the other operand, or, if this is
            # asked for, at its quantized values. What is not used of both is not compiled.
            at = [
                value if one is None or side.quantized is None else dequantize(side.quantized)
                for one, side, value in zip(
                    (self.backward or (None, None))[::-1], full, values, strict=True
                )
            ]
            _, pull = jax.vjp(lambda *operands: self.op.run(*operands, *extras), *at)
            grads = list(pull(g))
        if key is not None:
            key = _key_for(key, self.key_impl, g)
        for i, backward in enumerate(self.backward or ()):
            if not floats[i]:
                assert backward is not None
                # Each gradient draws other random bits.
                own = None if key is None else jax.random.fold_in(key, i)
                wanted = list(full)
                if backward.residual is not None:
                    wanted[1 - i] = full[1 - i]._replace(quantized=None)
                residuals = (tuple(wanted), extras)

                def gradient(
                    g: jax.Array,
                    residuals: Any,
                    key: Any,
                    upper: Any,
                    i: int = i,
                    how: Backward = backward,
                ) -> jax.Array:
                    operands, extras = residuals
                    return self.op.gradient(i, g, operands, Cotangent(how, key, upper), *extras)

                grads[i] = sharded_like(gradient, sides[i].value, g, residuals, own, upper)
        return tuple(map(_masked, grads, sides))

    def batched(
        self, axis: Axis, residuals: Any, tangents: Any, outs: Any
    ) -> tuple[LinearPair, int]:
        sides, key, extras, upper = residuals
        mapped = tuple(side.value for side in sides)
        # One contraction for the whole batch is possible if of each side all arrays are mapped, or
        # none are.
        plain = all(jax.tree.leaves(outs)) and not any(jax.tree.leaves((key, extras, upper)))
        unmapped = list(self.unmapped)
        for i, side in enumerate(sides):
            like = {tangents[i], *jax.tree.leaves(side.inside)}
            if side.quantized is not None:
                like.add(side.quantized.qvalue)
                fixed = dataclasses.replace(side.quantized, qvalue=None)
                if mapped[i] and not all(jax.tree.leaves(fixed)):
                    # A range that is the same for all examples: its scales are broadcast.
                    plain &= not any(jax.tree.leaves(fixed)) and not self.unmapped[i]
                    unmapped[i] = True
                elif mapped[i]:
                    plain &= not self.unmapped[i]
                else:
                    plain &= not any(jax.tree.leaves(fixed))
            plain &= like == {mapped[i]}
        whole = self.op.batched(*mapped, self.lhs_ndim) if plain and any(mapped) else None
        if whole is None:
            return super().batched(axis, residuals, tangents, outs)
        op, out_axis = whole
        backward = self.backward
        if backward is not None:
            backward = tuple(one and _mapped_noise(one, out_axis) for one in backward)
        ndim = self.lhs_ndim + mapped[0]
        return dataclasses.replace(
            self, op=op, lhs_ndim=ndim, backward=backward, unmapped=tuple(unmapped)
        ), out_axis


def _mapped_noise(backward: Backward, axis: int) -> Backward:
    """Return how a gradient with one more batch axis is quantized."""
    axes = backward.channelwise_noise_axes
    if not axes or backward.qtype is None:
        return backward
    moved = (a + (a >= axis) for a in axes if a >= 0)
    negative = (a for a in axes if a < 0)
    return dataclasses.replace(backward, channelwise_noise_axes=(axis, *moved, *negative))


def _masked(x: jax.Array, side: Residual) -> jax.Array:
    if side.inside is None:
        return x
    return lax.select(side.inside, x, lax.full_like(x, 0))


def _with_all_axes(side: Residual) -> Residual:
    """Return the residual with all axes in its scales."""
    if side.quantized is None:
        return side
    ndim = side.quantized.ndim
    quantized = jax.tree.map(
        lambda x: lax.expand_dims(x, range(ndim - x.ndim)) if x.ndim < ndim else x, side.quantized
    )
    return side._replace(quantized=quantized)


def _key_for(key: jax.Array, impl: Any, g: jax.Array) -> jax.Array:
    """Return a key that depends on the cotangent.

    Steps of a loop then differ.
    """
    if impl is not None:
        key = jax.random.wrap_key_data(key, impl=impl)
    width = jnp.uint16 if g.dtype.itemsize == 2 else jnp.uint32
    bits = lax.bitcast_convert_type(g, width).astype(jnp.uint32)
    return jax.random.fold_in(key, lax.reduce_sum(bits, range(bits.ndim)))


# Jitted so that a model with many equal layers traces it once.
@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def train(
    op: Any,
    hows: Hows,
    backward: Backwards | None,
    operands: tuple[jax.Array, jax.Array],
    calibrations: tuple[Calibration | None, Calibration | None],
    key: jax.Array | None,
    extras: tuple[Any, ...] = (),
    cotangent: Calibration | None = None,
    quantized: tuple[QArray | None, QArray | None] = (None, None),
) -> jax.Array:
    """Run a contraction of quantized operands, with the derivatives that `backward` asks for.

    Args:
      op: the contraction.
      hows: how each operand is quantized; None: it stays float.
      backward: how each gradient is quantized; None: float.
      operands: float arrays.
      calibrations: a range for each operand, or None to measure it.
      key: random key, for stochastic rounding.
      extras: the other arrays that it takes.
      cotangent: the range of the cotangent, or None to measure it.
      quantized: quantized values of each operand, or None to quantize it.
    """
    sides = tuple(
        _quantized(op, i, *given)
        if quantized[i] is None
        else Residual(operands[i], jax.tree.map(lax.stop_gradient, quantized[i]), None)
        for i, given in enumerate(zip(operands, hows, calibrations, strict=True))
    )
    lhs, rhs = (lax.stop_gradient(s.value) if s.quantized is None else s.quantized for s in sides)
    value = op.run(lhs, rhs, *extras)
    backwards = backward or (None, None)
    # The quantized values of an operand are for the gradient of the other one.
    sides = tuple(
        side if other is not None and other.residual is None else side._replace(quantized=None)
        for side, other in zip(sides, backwards[::-1], strict=True)
    )
    impl = None
    if all(one is None or one.stochastic_rounding is None for one in backwards):
        key = None
    elif key is not None and jnp.issubdtype(key.dtype, jax.dtypes.prng_key):
        impl, key = jax.random.key_impl(key), jax.random.key_data(key)
    upper = None if cotangent is None else lax.stop_gradient(cotangent.upper)
    pair = TrainingPair(op, operands[0].ndim, backward, impl)
    return with_tangent(value, pair, (sides, key, extras, upper), operands)


def _quantized(
    op: Any,
    side: int,
    x: jax.Array,
    how: HowToQuantize | None,
    calibration: Calibration | None,
) -> Residual:
    if how is None:
        return Residual(x, None, None)
    fixed = lax.stop_gradient(x)
    channel_axes, tiles = op.granularity(side, x.shape, how)
    cut = slices(x.shape, channel_axes, tiles)
    if calibration is None and not parse_calibration_method(how.method).clips:
        quantized = quantize_scaled(
            fixed,
            how.qtype,
            channel_axes=channel_axes,
            tile_axes=tiles,
            method=how.method,
            scale_dtype=how.scale_dtype,
        )
        return Residual(x, quantized, None)
    if calibration is None:
        calibration = calibrate(
            fixed, how.qtype, channel_axes=channel_axes, tile_axes=tiles, method=how.method
        )
    calibration = jax.tree.map(lax.stop_gradient, calibration)
    parts = scale_of(calibration, how.qtype, how.scale_dtype)
    if not how.masks:
        fixed = without_infinities(fixed)
    quantized = quantize_with(fixed, how.qtype, *parts, tile_axes=dict(cut.ragged))
    return Residual(x, quantized, inside(fixed, calibration, cut) if how.masks else None)
