"""The static arguments of quantizing for training, and checks of all arguments."""

from __future__ import annotations

import dataclasses
import enum
import math
from typing import Any

import jax
import jax.numpy as jnp

from .. import checks

_OP = "quantize_int8"


class Noise(enum.IntEnum):
    """What is added before rounding; numbers as in ``csrc/training/table.h``."""

    NONE = 0
    GIVEN = 1
    UNIFORM = 2
    LOW_BITS = 3


@dataclasses.dataclass(frozen=True)
class Config:
    """The static arguments of quantizing for training."""

    by_row: bool
    factors: bool
    """Whether numbers are multiplied with factors first."""
    noise: Noise

    def scale_shape(self, x: jax.Array) -> tuple[int, ...]:
        """Return the shape of the scales of x."""
        return (*x.shape[:-1],) if self.by_row else (*x.shape[:-2], x.shape[-1])


def config(
    x: jax.Array,
    factors: jax.Array | None,
    noise: jax.Array | None,
    key: jax.Array | None,
    *,
    by_row: bool,
    low_bits: bool,
) -> Config:
    """Return the static arguments.

    Raises:
        TypeError, ValueError: an argument is another than ``quantize_int8`` takes.
    """
    checks.dtype(_OP, "x", x.dtype, checks.FLOATS)
    if x.ndim < 3:
        raise ValueError(
            f"{_OP}: x must have 3 axes or more, blocks, rows and columns last, got {x.shape}"
        )
    *groups, blocks, rows, columns = x.shape
    size = math.prod((blocks, rows, columns))
    if isinstance(size, int) and size >= 2**32:
        raise ValueError(
            f"{_OP}: the last three axes of x must have less than 2**32 numbers, got {x.shape}"
        )
    if factors is not None:
        checks.dtype(_OP, "factors", factors.dtype, (jnp.float32,))
        count, each = (columns, "column") if by_row else (rows, "row")
        checks.shape(_OP, "factors", factors, (*groups, blocks, count), f"one for each {each}")
    if noise is not None and key is not None:
        raise ValueError(f"{_OP}: noise must be None with a key, got both")
    kind = Noise.NONE
    if noise is not None:
        kind = Noise.GIVEN
        checks.dtype(_OP, "noise", noise.dtype, (jnp.float32,))
        checks.shape(_OP, "noise", noise, (*groups, blocks, rows), "one for each row")
    elif key is not None:
        kind = Noise.LOW_BITS if low_bits else Noise.UNIFORM
        checks.dtype(_OP, "key", key.dtype, (jnp.uint32,))
        checks.shape(_OP, "key", key, (*groups, 2), "two words for each group of blocks")
    return Config(bool(by_row), factors is not None, kind)


def operands_of(config: Config, *operands: Any) -> tuple[Any, Any, Any]:
    """Return the factors, the noise and the key; None for those that are not there."""
    rest = list(operands)
    factors = rest.pop(0) if config.factors else None
    given = rest.pop(0) if config.noise is Noise.GIVEN else None
    return factors, given, rest.pop(0) if rest else None
