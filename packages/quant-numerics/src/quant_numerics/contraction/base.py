"""What all contractions have in common: how operands are quantized, residuals and derivatives."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from quant_numerics.array.explicit import sharded_like
from quant_numerics.array.qarray import QArray, dequantize
from quant_numerics.array.tiles import dot_granularity, slices
from quant_numerics.autodiff.linear import Axis, LinearPair, with_tangent
from quant_numerics.calibration.calibrate import (
    Calibration,
    calibrate,
    inside,
    parse_calibration_method,
    scale_of,
)
from quant_numerics.calibration.quantize import quantize, quantize_with
from quant_numerics.contraction.cotangent import Cotangent, quantize_scaled, without_infinities
from quant_numerics.contraction.options import (
    Backward,
    Backwards,
    Hows,
    HowToQuantize,
    both_gradients,
    float_operands,
    hashable,
)
from quant_numerics.formats.qtypes import float_dtype, get_qtype

Side = jax.Array | QArray


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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contraction(abc.ABC):
    """A bilinear operation of two float arrays, without them. Hashable by value.

    Methods that take `side` are for operand 0 (lhs) or 1 (rhs). `extras` are arrays that an
    operation takes beside its operands, such as the sizes of groups.

    Attributes:
      precision: for products of float arrays, as in ``lax``.
      preferred_element_type: dtype of the result; None for the wider of the operands'.

    Raises:
      TypeError: a preferred dtype that is not in ``FLOAT_DTYPES``.
    """

    precision: Any = None
    preferred_element_type: Any = None

    def __post_init__(self):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, hashable(getattr(self, field.name)))
        if (dtype := self.preferred_element_type) is not None:
            dtype = float_dtype(dtype, "preferred_element_type")
            object.__setattr__(self, "preferred_element_type", dtype)

    @property
    def trains(self) -> bool:
        """Return whether its gradients can be contractions of quantized arrays."""
        return True

    @abc.abstractmethod
    def shared(self, side: int, ndim: int) -> tuple[int, ...]:
        """Return the axes of an operand that share a scale."""

    def takes_tiles(self, side: int, shape: Sequence[int]) -> bool:
        """Return whether scales of an operand may differ along the axes that share one."""
        return True

    def takes_scales(self, side: int, shape: Sequence[int], scale_shape: Sequence[int]) -> bool:
        """Return whether an operand's scales allow a contraction of its quantized values."""
        shared = self.shared(side, len(shape))
        sums = math.prod(scale_shape[axis] for axis in shared)
        # One scale for each contracted index would take a separate contraction for each.
        fewer = sums < math.prod(shape[axis] for axis in shared)
        return sums == 1 or (fewer and self.takes_tiles(side, shape))

    def tiled_sizes(
        self, shapes: Sequence[tuple[int, ...]], hows: Sequence[HowToQuantize | None]
    ) -> tuple[int, ...]:
        """Return the contracted sizes in order; empty if tiles are impossible.

        Args:
          shapes: of both operands.
          hows: how they are quantized.
        """
        sizes = {
            tuple(shape[axis] for axis in self.shared(side, len(shape)))
            for side, shape in enumerate(shapes)
        }
        # An einsum may broadcast an axis of size 1.
        return sizes.pop() if len(sizes) == 1 else ()

    def sparse_axis(self, side: int, ndim: int) -> int | None:
        """Return the axis of an operand that N:M sparsity follows."""
        shared = self.shared(side, ndim)
        return shared[-1] if shared else None

    def granularity(
        self, side: int, shape: tuple[int, ...], how: HowToQuantize
    ) -> tuple[Sequence[int], dict[int, int]]:
        """Return the channel axes and tiles of an operand, as ``quantize`` takes them."""
        tile = get_qtype(how.qtype).block if how.tile_size is None else how.tile_size
        return dot_granularity(shape, self.shared(side, len(shape)), tile, how.channelwise)

    def quantize(self, side: int, x: jax.Array, how: HowToQuantize) -> QArray:
        """Quantize an operand as finely as the operation allows.

        Raises:
          ValueError: as ``quantize_for_dot``.
        """
        channels, tiles = self.granularity(side, x.shape, how)
        return quantize(
            x,
            how.qtype,
            channel_axes=channels,
            tile_axes=tiles,
            method=how.method,
            scale_dtype=how.scale_dtype,
        )

    @abc.abstractmethod
    def run(self, lhs: Side, rhs: Side, *extras: Any) -> jax.Array:
        """Return the result; either operand may be quantized."""

    def train(
        self,
        lhs: Any,
        rhs: Any,
        *extras: Any,
        lhs_how: HowToQuantize | None,
        rhs_how: HowToQuantize | None,
        backward: Backward | Backwards | None = None,
        lhs_calibration: Calibration | None = None,
        rhs_calibration: Calibration | None = None,
        cotangent_calibration: Calibration | None = None,
        key: jax.Array | None = None,
        lhs_quantized: QArray | None = None,
        rhs_quantized: QArray | None = None,
    ) -> jax.Array:
        """Quantize float operands and contract them, with derivatives.

        The value is ``run(quantize(0, lhs, lhs_how), quantize(1, rhs, rhs_how), *extras)``, bit
        for bit. Of the derivatives, forward mode is always that of the float op at the operands
        (straight through, arXiv:1308.3432), and so is reverse mode without `backward`. With
        `backward`, each gradient is a contraction of quantized arrays:

        - the cotangent, quantized with one scale per index of the axes that the gradient keeps;
        - the other operand's quantized values from the forward pass. Its scales lie along axes
          that this contraction sums over. So they are multiplied into the cotangent before the
          cotangent is quantized, and the sum is over integers. An operand with tiles or zero
          points is quantized again, to the cotangent's format; a float one stays float.
          ``Backward.residual`` changes this.

        A gradient is zero where its operand lies outside of the range that it was clipped to: with
        calibration methods that cut off, and with a given calibration, unless
        ``HowToQuantize.masks`` is False.

        Under vmap, an operand that is the same for all examples gets its gradient as one
        contraction over the whole batch, where the cotangent has one scale per column, not per
        column and example.

        Args:
          lhs: bfloat16, float16, float32 or float64 array.
          rhs: the same.
          extras: as for ``run``.
          lhs_how: how `lhs` is quantized; None: it stays float.
          rhs_how: the same for `rhs`.
          backward: how the backward contractions are quantized; a pair for the gradients of `lhs`
            and of `rhs`; None: float.
          lhs_calibration: a range to use instead of measuring `lhs`, shaped like its scale.
          rhs_calibration: the same for `rhs`.
          cotangent_calibration: a range to use instead of measuring the cotangent, one for all of
            it: a symmetric one of shape (), whose `upper` is 0 for scale 1. What lies outside
            saturates.
          key: random key, for `backward` with stochastic rounding. The bits of the cotangent and
            the operand's side are mixed in, so one key is enough for all steps of a loop.
          lhs_quantized: what ``quantize(0, lhs, lhs_how)`` returns, if it is known: quantized
            before devices gathered it. No gradient is cut off by its range.
          rhs_quantized: the same for `rhs`.

        Returns:
          Array as ``run`` returns it. Gradients have the operands' dtypes.

        Raises:
          TypeError: an operand that is not a float array.
          ValueError: as ``quantize`` and ``run``; stochastic rounding without a key; a cotangent's
            range where it has tiles, or where no gradient is quantized; tiles or blocks that the
            contraction or one of its gradients can't have.
        """
        hows, calibrations = (lhs_how, rhs_how), (lhs_calibration, rhs_calibration)
        operands = float_operands(lhs, rhs)
        for name, how, calibration in zip(("lhs", "rhs"), hows, calibrations, strict=True):
            if how is None and calibration is not None:
                raise ValueError(
                    f"{name}_how must be given with {name}_calibration, got None. Give both."
                )
        gradients = both_gradients(backward, key, cotangent_calibration)
        self.check_training(operands, hows, gradients)
        if hows == (None, None) and gradients is None:
            return self.run(*operands, *extras)
        given = operands, calibrations, key, extras, cotangent_calibration
        return _train(self, hows, gradients, *given, (lhs_quantized, rhs_quantized))

    def check_training(
        self, operands: Sequence[jax.Array], hows: Hows, backward: Backwards | None
    ) -> None:
        """Raise a ValueError if it doesn't train, or if it or a gradient can't have its tiles."""
        if not self.trains:
            raise ValueError(
                "a contraction that trains must have quantized contractions as its gradients, got "
                f"{self}. Use run, or the dimension numbers of ragged_dot."
            )

    @abc.abstractmethod
    def gradient(
        self, side: int, g: jax.Array, operands: Sequence[Residual], to: Cotangent, *extras: Any
    ) -> jax.Array:
        """Return the quantized gradient of an operand.

        Args:
          side: which operand.
          g: the cotangent.
          operands: both operands, of which the other one may be quantized.
          to: how `g` is quantized.
          extras: as for ``run``.
        """

    def batched(self, lhs: bool, rhs: bool, lhs_ndim: int) -> tuple[Any, int] | None:
        """Return this for a whole batch, and where the batch axis comes out; None if it can't be.

        Args:
          lhs: whether `lhs` has the batch axis, as its first one.
          rhs: the same for `rhs`.
          lhs_ndim: the number of axes of `lhs` without it.
        """
        return None


@dataclasses.dataclass(frozen=True)
class TrainingPair(LinearPair):
    """The derivative of a contraction: float forward, quantized (or float) backward."""

    op: Any  # a Contraction, or what its `batched` returns
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
def _train(
    op: Contraction,
    hows: Hows,
    backward: Backwards | None,
    operands: tuple[jax.Array, jax.Array],
    calibrations: tuple[Calibration | None, Calibration | None],
    key: jax.Array | None,
    extras: tuple[Any, ...],
    cotangent: Calibration | None,
    quantized: tuple[QArray | None, QArray | None],
) -> jax.Array:
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
    op: Contraction,
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
