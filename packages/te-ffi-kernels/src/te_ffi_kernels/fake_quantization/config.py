"""The static arguments of fake quantization, and checks of all arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .. import checks

_OP = "fake_quantize"
_LONG = 64
"""Of this length, even an eighth of an axis fills bytes."""


@dataclasses.dataclass(frozen=True)
class Config:
    """The static arguments of fake quantization."""

    bits: int
    symmetric: bool
    batch_axes: int
    share: float
    """Of one more range in the sums."""
    observe: bool
    join: bool
    seen: bool
    """Whether there is a table of bounds."""
    bits_axis: int | None
    """Along which eight numbers of x share a byte that says where they are in their range."""


def config(
    x: jax.Array,
    terms: jax.Array,
    row: jax.Array,
    seen: jax.Array | None,
    *,
    bits: Any,
    batch_axes: Any,
    decay: Any,
    **flags: bool,
) -> Config:
    """Return the static arguments.

    Raises:
        TypeError, ValueError: an argument is another than ``fake_quantize`` takes.
    """
    checks.dtype(_OP, "x", x.dtype, checks.FLOATS)
    if not isinstance(bits, int) or not 2 <= bits <= 16:
        raise ValueError(f"{_OP}: bits must be an int from 2 to 16, got {bits!r}")
    if not isinstance(batch_axes, int) or not 0 <= batch_axes <= x.ndim:
        raise ValueError(
            f"{_OP}: batch_axes must be how many leading axes of x are a batch's, from 0 to "
            f"{x.ndim}, got {batch_axes!r}"
        )
    if decay is not None and not 0 < decay < 1:
        raise ValueError(f"{_OP}: decay must be None or between 0 and 1, got {decay!r}")
    checks.dtype(_OP, "terms", terms.dtype, (jnp.float32,))
    if terms.ndim != 3 or terms.shape[0] < 1 or terms.shape[1:] != (5, 2):
        raise ValueError(
            f"{_OP}: terms must have shape [rows, 5, 2] with at least one row, got {terms.shape}"
        )
    checks.dtype(_OP, "row", row.dtype, (jnp.int32,))
    checks.shape(_OP, "row", row, ())
    if seen is not None:
        checks.dtype(_OP, "seen", seen.dtype, (jnp.float32,))
        checks.shape(_OP, "seen", seen, (terms.shape[0], 2), "two bounds for each row of terms")
    elif flags["observe"]:
        raise ValueError(f"{_OP}: seen must be an array with observe=True, got None")
    share = 1.0 if decay is None else 1.0 - float(decay)
    return Config(
        bits=bits,
        batch_axes=batch_axes,
        share=share,
        seen=seen is not None,
        bits_axis=bits_axis_of(x.shape),
        **flags,
    )


def bits_axis_of(shape: Sequence[Any]) -> int | None:
    """Return the longest of the axes in the middle, if it is long.

    Batches and features are more often shared out over devices, and XLA reads bits along the last
    axis slowly.
    """
    lengths = {axis: n for axis, n in enumerate(shape) if 0 < axis < len(shape) - 1}
    long = [axis for axis, n in lengths.items() if isinstance(n, int) and n >= _LONG]
    return max(long, key=lengths.__getitem__, default=None)
