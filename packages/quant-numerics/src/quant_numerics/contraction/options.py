"""How contractions are quantized, forward and backward."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from quant_numerics.array.qarray import QArray
from quant_numerics.calibration.calibrate import Calibration, parse_calibration_method
from quant_numerics.formats.qtypes import float_dtype, get_qtype


@dataclasses.dataclass(frozen=True)
class HowToQuantize:
    """How an operand is quantized in the forward pass. Hashable.

    Attributes:
      qtype: a name in ``QTYPES``, an alias or a dtype; stored as the name.
      tile_size: elements (a float: one over the number of tiles) per scale along the contracted
        axes, as if they were one; contractions only, not convolutions.
      method: calibration method, see ``parse_calibration_method``.
      channelwise: False for one scale for the whole array, or per tile alone.
      scale_dtype: None, or "float16" or "bfloat16", see ``quantize``; stored as the name.
      masks: whether the gradient of a training op is zero where its range cuts the operand off.
        False is for ranges that follow from other steps: these cut off what has grown since, and
        an infinity becomes a NaN, so that what checks a step for overflow finds it.
    """

    qtype: str
    tile_size: int | float | None = None
    method: str = "absmax"
    channelwise: bool = True
    scale_dtype: str | None = None
    masks: bool = True

    def __post_init__(self):
        kind = get_qtype(self.qtype).with_scales(self.scale_dtype)
        object.__setattr__(self, "qtype", kind.name)
        if self.scale_dtype is not None:
            object.__setattr__(self, "scale_dtype", kind.scale_dtype.name)
        parse_calibration_method(self.method)


@dataclasses.dataclass(frozen=True)
class Backward:
    """How a contraction of the backward pass is quantized. Hashable.

    Attributes:
      qtype: the format of the cotangent; stored as the name. None leaves the cotangent float, and
        multiplies it with the other operand's quantized values, dequantized.
      method: calibration method for the cotangent.
      tile_size: elements (a float: one over the number of tiles) per scale along the last axis
        that is contracted; contractions only, not convolutions.
      channelwise: False for one scale per cotangent, or per tile alone.
      stochastic_rounding: None, or the method of a ``StochasticRounding`` of the cotangent.
      channelwise_noise_axes: the cotangent's axes along which that noise differs.
      residual: the other operand: None for its quantized values of the forward pass,
        ``"original"`` for the operand itself, or how that is quantized for this contraction.
    """

    qtype: str | None
    method: str = "absmax"
    tile_size: int | float | None = None
    channelwise: bool = True
    stochastic_rounding: Literal["uniform", "low_bit_uniform"] | None = None
    channelwise_noise_axes: tuple[int, ...] = (0,)
    residual: HowToQuantize | Literal["original"] | None = None

    def __post_init__(self):
        if self.qtype is not None:
            object.__setattr__(self, "qtype", get_qtype(self.qtype).name)
        elif any(getattr(self, f.name) != f.default for f in dataclasses.fields(self)[1:]):
            raise ValueError(
                "Backward without a qtype must have no other options, since nothing is quantized, "
                f"got {self!r}. Give it a qtype, or leave them out."
            )
        object.__setattr__(self, "channelwise_noise_axes", tuple(self.channelwise_noise_axes))
        if not parse_calibration_method(self.method).is_symmetric:
            raise ValueError(
                f"the method of Backward must be symmetric, got {self.method!r}. Use "
                "'absmax', 'rms,factor' or another one without zero points."
            )
        if self.stochastic_rounding not in (None, "uniform", "low_bit_uniform"):
            raise ValueError(
                "stochastic_rounding must be None, 'uniform' or 'low_bit_uniform', got "
                f"{self.stochastic_rounding!r}. Choose one of them."
            )
        if not isinstance(self.residual, HowToQuantize) and self.residual not in (None, "original"):
            raise ValueError(
                "residual must be None, 'original' or a HowToQuantize, got "
                f"{self.residual!r}. None uses the quantized values of the forward pass."
            )

    @property
    def has_tiles(self) -> bool:
        """Return whether scales differ along the contracted axis."""
        residual = self.residual if isinstance(self.residual, HowToQuantize) else None
        formats = [self.qtype] if self.qtype is not None else []
        formats += [residual.qtype] if residual is not None else []
        sizes = (self.tile_size, None if residual is None else residual.tile_size)
        return any(size is not None for size in sizes) or any(
            get_qtype(qtype).block is not None for qtype in formats
        )


Hows = tuple[HowToQuantize | None, HowToQuantize | None]
"""How either operand is quantized; None: it stays float."""
Backwards = tuple[Backward | None, Backward | None]
"""How the gradient of either operand is quantized; None: float."""


def float_operands(lhs: Any, rhs: Any) -> tuple[jax.Array, jax.Array]:
    """Return operands as float arrays.

    Raises:
      TypeError: an operand that is not a float array.
    """
    arrays = []
    for name, x in (("lhs", lhs), ("rhs", rhs)):
        if isinstance(x, QArray):
            raise TypeError(
                f"{name} of a training op must be a float array, which is quantized in each step, "
                f"got a QArray of {x.qtype}. Give the float parameter and {name}_how, or call run "
                "where it is not trained."
            )
        x = jnp.asarray(x)
        float_dtype(x.dtype, f"{name} of a training op")
        arrays.append(x)
    return arrays[0], arrays[1]


def both_gradients(
    backward: Backward | Backwards | None, key: Any, calibration: Calibration | None = None
) -> Backwards | None:
    """Return how both gradients are quantized; None if neither is.

    Raises:
      ValueError: stochastic rounding without a key, something other than two gradients, or a range
        that the cotangent can't have.
    """
    if backward is None or isinstance(backward, Backward):
        backward = (backward, backward)
    pair = tuple(backward)
    if len(pair) != 2 or not all(one is None or isinstance(one, Backward) for one in pair):
        raise ValueError(
            "backward must be a Backward for both gradients, or a pair of Backward or None for "
            f"those of lhs and rhs, got {backward!r}"
        )
    for one in pair:
        if one is not None and one.stochastic_rounding is not None and key is None:
            raise ValueError(
                "key must be a random key where backward has "
                f"stochastic_rounding={one.stochastic_rounding!r}, got None. Pass "
                "key=jax.random.key(...), another one for each training step."
            )
    if calibration is not None:
        _check_range(calibration, pair)
    return None if pair == (None, None) else (pair[0], pair[1])


def _check_range(calibration: Calibration, pair: Sequence[Backward | None]) -> None:
    if calibration.lower is not None or jnp.shape(calibration.upper):
        raise ValueError(
            "cotangent_calibration must be symmetric and of shape (), a range for the whole "
            f"cotangent, got {calibration!r}. Use Calibration(None, upper)."
        )
    tiled = [one for one in pair if one is not None and one.has_tiles]
    if tiled or not any(one is not None and one.qtype is not None for one in pair):
        raise ValueError(
            "backward must quantize a gradient, without tiles or blocks, where "
            f"cotangent_calibration is given, got {pair!r}. Leave the calibration out to measure "
            "the range of each tile."
        )


def hashable(value: Any) -> Any:
    """Return a value with its lists and NumPy arrays as tuples, all the way down."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    # Subclasses of tuple, such as dimension numbers and shardings, stay themselves.
    return tuple(map(hashable, value)) if type(value) in (list, tuple) else value
