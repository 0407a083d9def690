"""The options of training ops."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from quant_numerics.array.qarray import QArray
from quant_numerics.calibration.method import parse_calibration_method
from quant_numerics.formats.dtypes import float_dtype
from quant_numerics.formats.qtypes import get_qtype


@dataclasses.dataclass(frozen=True)
class HowToQuantize:
    """Say how an operand is quantized in the forward pass. Hashable.

    Attributes:
      qtype: a name in ``QTYPES``, an alias or a dtype; kept as the name.
      tile_size: elements (a float: one over the number of tiles) per scale along the contracted
        axes, as if they were one; contractions only, not convolutions.
      method: calibration method, see ``parse_calibration_method``.
      channelwise: False for one scale in all, tiles aside.
      scale_dtype: None, or "float16" or "bfloat16", see ``quantize``; kept as the name.
    """

    qtype: str
    tile_size: int | float | None = None
    method: str = "absmax"
    channelwise: bool = True
    scale_dtype: str | None = None

    def __post_init__(self):
        kind = get_qtype(self.qtype).with_scales(self.scale_dtype)
        object.__setattr__(self, "qtype", kind.name)
        if self.scale_dtype is not None:
            object.__setattr__(self, "scale_dtype", kind.scale_dtype.name)
        parse_calibration_method(self.method)


@dataclasses.dataclass(frozen=True)
class Backward:
    """Say how the contractions of the backward pass are quantized. Hashable.

    Attributes:
      qtype: the format of cotangents; kept as the name.
      method: calibration method for cotangents.
      weight_grad_tile_size: tile size along the contracted axis of the weight's gradient;
        contractions only, not convolutions.
      channelwise: False for one scale per cotangent, tiles aside.
      stochastic_rounding: None, or the method of a ``StochasticRounding`` of the cotangents.
      channelwise_noise_axes: the cotangent's axes along which that noise differs.
    """

    qtype: str
    method: str = "absmax"
    weight_grad_tile_size: int | float | None = None
    channelwise: bool = True
    stochastic_rounding: Literal["uniform", "low_bit_uniform"] | None = None
    channelwise_noise_axes: tuple[int, ...] = (0,)

    def __post_init__(self):
        object.__setattr__(self, "qtype", get_qtype(self.qtype).name)
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


def check_operands(
    operands: Sequence[Any], hows: Sequence[HowToQuantize | None], calibrations: Sequence[Any]
) -> tuple[jax.Array, jax.Array]:
    """Return the operands as float arrays.

    Raises:
      TypeError: an operand that is no float array.
      ValueError: a calibration of an operand that stays float.
    """
    arrays = []
    for name, x, how, calibration in zip(("lhs", "rhs"), operands, hows, calibrations, strict=True):
        if isinstance(x, QArray):
            raise TypeError(
                f"{name} of a training op must be a float array, which is quantized in each step, "
                f"got a QArray of {x.qtype}. Give the float parameter and {name}_how, or use the "
                "op without train_ where it is not trained."
            )
        x = jnp.asarray(x)
        float_dtype(x.dtype, f"{name} of a training op")
        if how is None and calibration is not None:
            raise ValueError(
                f"{name}_how must be given with {name}_calibration, got None. Give both."
            )
        arrays.append(x)
    return arrays[0], arrays[1]


def check_backward(backward: Backward | None, key: Any, weight: int | None) -> None:
    """Raise a ValueError for what `backward` asks for and is not given."""
    if weight not in (None, 0, 1):
        raise ValueError(
            f"weight must be None, 0 (lhs) or 1 (rhs), got {weight!r}. Choose one of them."
        )
    if backward is None:
        return
    if backward.stochastic_rounding is not None and key is None:
        raise ValueError(
            "key must be a random key where backward has "
            f"stochastic_rounding={backward.stochastic_rounding!r}, got None. Pass "
            "key=jax.random.key(...), another one for each training step."
        )
    if backward.weight_grad_tile_size is not None and weight is None:
        raise ValueError(
            "weight must be given where backward has a weight_grad_tile_size, got None. Pass "
            "weight=0 (lhs) or weight=1 (rhs)."
        )


def hashable(value: Any) -> Any:
    """Return a value with its lists made tuples."""
    return tuple(map(hashable, value)) if isinstance(value, list | tuple) else value


def result_dtype(preferred: DTypeLike | None) -> Any:
    """Return a preferred dtype, checked, or None."""
    return None if preferred is None else float_dtype(preferred, "preferred_element_type")
