"""Moments of Adam in 8 bits: numbers that share a scale in blocks along one axis.

Dettmers et al., "8-bit Optimizers via Block-wise Quantization" (arXiv:2110.02861), for the blocks.
The two moments differ in what they need.

* The first one has signs, and forgets in about ten steps. It is stored as the square root of its
  share of the block's largest magnitude: small ones keep digits.
* The second one is divided by, and remembers a thousand steps. It is stored as a logarithm: the
  exponent and three bits of the mantissa of a float32, on a grid that is the same at all steps and
  in all blocks. A block says only where its 255 points lie on it. With a grid that follows the
  block's maximum, each step would round all numbers again, and the errors of a thousand steps would
  add up.

Both are rounded at random, so that averages stay right: a moment that changes by less than half a
step would never change otherwise. The numbers for that are hashes of where and when.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

_LEVELS = 127
"""Magnitudes of a first moment above 0."""
_CUT = 20
"""Bits of a float32 that second moments lose: 8 points are left from a number to its double."""
_POINTS = 255
"""Points of a block above 0: its smallest is about 2 ** -31.8 of its largest."""
_LEAST_ROW = 64
"""Numbers of the last axis from which blocks lie along it."""
_NEAR = 1e-3
"""How near to the next level a number is on it: what roots are off by, and more."""


class Moment(NamedTuple):
    """A moment of one parameter.

    Attributes:
        values: int8 for a first moment and uint8 for a second one, of the parameter's shape: it
            is sharded as the parameter is.
        scales: of the same shape but for one axis, which has one for each block: float32, the
            largest magnitude of a first moment; int16 of a second one, the point of the grid at
            which a block's largest number lies.
    """

    values: jax.Array
    scales: jax.Array


def axis_of(shape: tuple[int, ...]) -> int:
    """Return the axis along which blocks lie: the last one, or the longest if that is short."""
    last = len(shape) - 1
    if last < 0 or shape[last] >= _LEAST_ROW:
        return last
    return max(range(len(shape)), key=lambda axis: (shape[axis], axis))


def first_moment(x: jax.Array, noise: jax.Array, block: int) -> Moment:
    """Return a first moment in 8 bits.

    Args:
        x: floating[shape]. Not a number and infinity make all of their block NaN.
        noise: float32[shape], uniform in [0, 1).
        block: how many numbers share a scale.
    """
    x = x.astype(jnp.float32)
    # Not every reduction that XLA compiles for CPU propagates a NaN.
    most = _largest(jnp.where(jnp.isnan(x), jnp.inf, jnp.abs(x)), block)
    share = jnp.abs(x) / _spread(jnp.where(most == 0, 1, most), x.shape, block)
    level = jnp.floor(jnp.sqrt(share) * _LEVELS + _NEAR)
    level = jnp.clip(level, 0, _LEVELS - 1)
    # The levels are squares: the chance of the one above is how far it is on the way to it.
    above = (share * _LEVELS**2 - level**2) / (2 * level + 1)
    level = level + (noise < above)
    return Moment((jnp.sign(x) * level).astype(jnp.int8), most)


def second_moment(x: jax.Array, noise: jax.Array, block: int) -> Moment:
    """Return a second moment in 8 bits.

    Numbers above 0 that are beyond the block's points are stored as the smallest: the parameters
    that they are for move less. 0, infinity and NaN stay what they are.

    Args:
        x: floating[shape], not negative.
        noise: float32[shape], uniform in [0, 1).
        block: how many numbers share a scale.
    """
    bits = lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32)
    point, rest = bits >> _CUT, bits & ((1 << _CUT) - 1)
    # Floats are spread evenly between two points: the chance of the one above is what is cut off.
    point = point + (noise * (1 << _CUT) < rest)
    top = _largest(point, block)
    code = jnp.clip(point - _spread(top, x.shape, block) + _POINTS, 1, _POINTS)
    return Moment(jnp.where(x == 0, 0, code).astype(jnp.uint8), top.astype(jnp.int16))


def restored(moment: Moment, block: int) -> jax.Array:
    """Return a moment as float32[shape].

    Args:
        moment: a first or a second one.
        block: how many numbers share a scale.
    """
    values, shape = moment.values, moment.values.shape
    scales = _spread(moment.scales, shape, block)
    if values.dtype == jnp.int8:
        level = values.astype(jnp.float32)
        return jnp.sign(level) * (level / _LEVELS) ** 2 * scales
    point = jnp.maximum(scales.astype(jnp.int32) + values.astype(jnp.int32) - _POINTS, 0)
    found = lax.bitcast_convert_type(point << _CUT, jnp.float32)
    return jnp.where(values == 0, 0, found)


def noise_of(shape: tuple[int, ...], step: jax.Array, leaf: int) -> tuple[jax.Array, jax.Array]:
    """Return two arrays of numbers from [0, 1) that look random, for one parameter at one step.

    They are equal on all devices, and need neither memory nor a key. JAX's random bits take longer
    than the rest of a step of Adam.

    Args:
        shape: their shape.
        step: int32[], the number of the step.
        leaf: the number of the parameter.

    Returns:
        Two of float32[shape], in the middle of 65,536 equal parts.
    """
    position = jnp.zeros(shape, jnp.uint32)
    stride = 1
    for axis in reversed(range(len(shape))):
        # Without a reshape, so that each device computes its own part.
        position += lax.broadcasted_iota(jnp.uint32, shape, axis) * jnp.uint32(stride % 2**32)
        stride *= shape[axis]
    seed = _mixed(step.astype(jnp.uint32) + jnp.uint32(leaf * 0x9E3779B9 % 2**32))
    bits = _mixed(position ^ seed)
    one, other = ((half.astype(jnp.float32) + 0.5) / 2**16 for half in (bits >> 16, bits & 0xFFFF))
    return one, other


def _mixed(x: jax.Array) -> jax.Array:
    """Mix the bits of uint32: MurmurHash3's last steps (Appleby, 2011), with a constant added."""
    x = x + jnp.uint32(0x9E3779B9)
    x = (x ^ (x >> 16)) * jnp.uint32(0x85EBCA6B)
    x = (x ^ (x >> 13)) * jnp.uint32(0xC2B2AE35)
    return x ^ (x >> 16)


def _largest(x: jax.Array, block: int) -> jax.Array:
    """Return the largest number of each block; none is negative."""
    axis = axis_of(x.shape)
    if axis < 0:
        return x
    size = x.shape[axis]
    blocks = -(-size // block)
    if blocks == 1:
        return jnp.max(x, axis, keepdims=True, initial=0)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, blocks * block - size)
    if pad[axis][1]:
        x = jnp.pad(x, pad, constant_values=0)
    return jnp.max(x.reshape(*x.shape[:axis], blocks, block, *x.shape[axis + 1 :]), axis + 1)


def _spread(scales: jax.Array, shape: tuple[int, ...], block: int) -> jax.Array:
    """Return the scale of each number."""
    axis = axis_of(shape)
    if axis < 0 or scales.shape[axis] == 1:
        return jnp.broadcast_to(scales, shape)
    return lax.slice_in_dim(jnp.repeat(scales, block, axis), 0, shape[axis], axis=axis)
