"""The ``quant.fake_quant`` composite: how a program tells the converter of its scales."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from provider_odml.features import Site

from .._compat import composite_attribute

_CODES = {"int16": ("i16", -32768, 32767), "int8": ("i8", -128, 127), "int4": ("i4", -8, 7),
          "int2": ("i2", -2, 1)}  # fmt: skip


@dataclass(frozen=True)
class Grid:
    """The grid of a tensor.

    Attributes:
        qtype: the name of its qtype.
        scale: float32, of shape () or (channels,); of a matrix in blocks, of its shape with as many
            blocks instead of values along the axis that is not that of the channels.
        zero_point: None for 0.
        axis: that of the channels.
        narrow: whether the lowest code is not used: in parameters.
        block_size: how many values of a channel share a scale; 0 for all of them.
        mark: of blocks, the scale by which the file is found to have them. See ``stand_in``.
    """

    qtype: str
    scale: np.ndarray
    zero_point: int | None = None
    axis: int | None = None
    narrow: bool = False
    block_size: int = 0
    mark: float = 0.0

    @classmethod
    def of(cls, calibration: qn.Calibration, qtype: str) -> Grid:
        """Return the grid of a range."""
        bounds = jax.tree.map(lambda bound: jnp.float32(np.asarray(bound)), calibration)
        scale, zero_point, _ = qn.scale_of(bounds, qtype)
        point = None if zero_point is None else int(np.asarray(zero_point))
        return cls(qtype, np.asarray(scale, np.float32), point)

    @classmethod
    def fixed(cls, bounds: tuple[float, float], qtype: str) -> Grid:
        """Return the grid that LiteRT prescribes for a known output range."""
        if qtype == "int16":
            return cls(qtype, np.asarray(1 / 32768, np.float32))
        # In NumPy: it is asked for while a program is traced.
        scale = np.asarray((bounds[1] - bounds[0]) / 255, np.float32)
        return cls(qtype, scale, round(-128 - bounds[0] / float(scale)))

    def same(self, other: Grid) -> bool:
        """Return whether another grid is this one."""
        return (
            (self.qtype, self.zero_point or 0) == (other.qtype, other.zero_point or 0)
            and bool(np.all(self.scale == other.scale))
        )  # fmt: skip

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the composite."""
        if self.block_size:
            shape = [1, self.block_size] if self.axis == 0 else [self.block_size, 1]
            blocks = {"scale": self.scale, "block_shape": np.array(shape, np.int64)}
            return blocks | {"dtype": _CODES[self.qtype][0], "narrow_range": self.narrow}
        found: dict[str, Any] = {
            "scale": np.asarray(self.scale, np.float32).reshape(-1),
            "dtype": _CODES[self.qtype][0],
            "narrow_range": self.narrow,
        }
        if self.zero_point is not None:
            found["zero_point"] = np.asarray([self.zero_point], np.int64)
        if self.axis is not None:
            found["quantization_dimension"] = self.axis
        return found

    def round(self, x: jax.Array) -> jax.Array:
        """Return values on the grid, float32."""
        _, low, high = _CODES[self.qtype]
        scale = self._spread(x.ndim)
        point = np.float32(self.zero_point or 0)
        low = np.float32(low + self.narrow)
        rounded = jnp.clip(jnp.round(x / scale) + point, low, np.float32(high))
        return (rounded - point) * scale

    def stand_in(self, x: jax.Array) -> tuple[jax.Array, Grid]:
        """Return a matrix in blocks as one that the converter can write: its whole numbers.

        The converter knows of blocks and can't write them (0.5). It writes the same integers with
        one scale for all channels, the mark, by which ``litert.in_blocks`` finds them.
        """
        channels = np.full(x.shape[self.axis or 0], self.mark, np.float32)
        grid = Grid(self.qtype, channels, None, self.axis, self.narrow)
        return jnp.round(x / self._spread(x.ndim)) * np.float32(self.mark), grid

    def _spread(self, ndim: int) -> np.ndarray:
        """Return the scale of each value, or what is broadcast to it."""
        scale = np.asarray(self.scale, np.float32)
        if self.block_size:
            return np.repeat(scale, self.block_size, axis=0 if self.axis else 1)
        shape = [1] * ndim
        if self.axis is not None:
            shape[self.axis] = -1
        return scale.reshape(shape)


def fake_quant(x: jax.Array, grid: Grid, converting: bool) -> jax.Array:
    """Return a tensor on its grid, as the converter knows it.

    Args:
        x: the tensor.
        grid: its grid.
        converting: for the converter alone, which reads the attributes, and fails at what a
            tensor of many axes is rounded with.
    """
    if grid.block_size and converting:
        x, grid = grid.stand_in(x)

    @functools.partial(jax.lax.composite, name="quant.fake_quant")
    def composite(x: jax.Array, **attributes: Any) -> jax.Array:
        del attributes  # for the converter
        return x if converting else grid.round(x)

    return composite(x, **grid.attributes())


def is_dynamic(eqn: Any) -> bool:
    """Return whether an equation is what ``dynamic`` makes: one without a scale."""
    return not np.size(composite_attribute(eqn, "scale"))


def dynamic(x: jax.Array, channel_axes: tuple[int, ...]) -> jax.Array:
    """Return a tensor whose range the device finds as it runs."""
    attributes = {"scale": np.zeros(0, np.float32), "dtype": "i8", "narrow_range": False}

    @functools.partial(jax.lax.composite, name="quant.fake_quant")
    def composite(x: jax.Array, **attributes: Any) -> jax.Array:
        del attributes
        return qn.fake_quant(x, "int8", channel_axes=channel_axes, method="minmax")

    return composite(x, **attributes)


def grid_of(site: Site, calibration: qn.Calibration) -> Grid:
    """Return the grid of a site."""
    lower, upper = calibration
    if float(upper) == 0 and (lower is None or float(lower) == 0):
        upper = jnp.float32(1)  # a tensor of zeros: any scale will do but 0
    return Grid.of(qn.Calibration(lower, upper), site.qtype)
