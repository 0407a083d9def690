"""What all contractions have in common."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from quant_numerics.array.qarray import QArray
from quant_numerics.array.tiles import dot_granularity
from quant_numerics.calibration.calibrate import Calibration
from quant_numerics.calibration.quantize import quantize
from quant_numerics.contraction.cotangent import Cotangent
from quant_numerics.contraction.options import (
    Backward,
    Backwards,
    Hows,
    HowToQuantize,
    both_gradients,
    float_operands,
    hashable,
)
from quant_numerics.contraction.training import Residual, train
from quant_numerics.formats.qtypes import float_dtype, get_qtype

Side = jax.Array | QArray


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
        quantized = (lhs_quantized, rhs_quantized)
        return train(
            self,
            hows,
            gradients,
            operands,
            calibrations,
            key,
            extras,
            cotangent_calibration,
            quantized,
        )

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
