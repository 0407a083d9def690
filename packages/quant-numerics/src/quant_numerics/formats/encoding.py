"""Numbers to quantized values and back, once the scale is known; noise that rounds unbiased."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import DTypeLike

from quant_numerics.formats.qtypes import QType

_LARGEST_DIVISOR = 2.0**126
"""The largest power of two with a normal reciprocal; hardware may flush subnormals to zero."""


def encode(
    values: jax.Array,
    scale: jax.Array,
    kind: QType,
    zero_point: jax.Array | None = None,
    noise: jax.Array | None = None,
) -> jax.Array:
    """Return the quantized values of ``values / scale``, of float32 or float64.

    Ratios outside the range of the format are clipped to it. NaN becomes zero, or stays NaN in a
    float8 format. Where a scale is infinite, infinities become ±qmax and other values almost 0.
    `noise` is added in units of the last place before rounding to nearest; not for codebooks.
    """
    ratio = _ratio(values, scale, kind)
    if noise is not None:
        noise = noise.astype(ratio.dtype)
    if kind.kind == "int":
        if noise is not None:
            # The sum must not become a fused multiply-add, which rounds otherwise, on processors
            # that have one. What is clamped here is far outside the range.
            far = ratio.dtype.type(2.0 ** (kind.bits + 2))
            ratio = lax.clamp(-far, ratio, far) + noise
        qvalue = lax.round(ratio, lax.RoundingMethod.TO_NEAREST_EVEN)
        low, high = -kind.qmax, kind.qmax
        if zero_point is not None:
            assert kind.asymmetric is not None
            qvalue = qvalue + zero_point.astype(qvalue.dtype)
            low, high = kind.asymmetric
        qvalue = lax.clamp(qvalue.dtype.type(low), qvalue, qvalue.dtype.type(high))
        # Converting NaN to an integer is undefined; the NaN lives on in the scale.
        qvalue = _without_nan(qvalue)
        return qvalue.astype(kind.storage_dtype)
    limit = ratio.dtype.type(kind.qmax)
    ratio = lax.clamp(-limit, ratio, limit)
    if noise is not None:
        ratio = _round_at_random(ratio, noise, kind)
    if kind.codebook is not None:
        return _nearest(_without_nan(ratio), kind.codebook).astype(kind.storage_dtype)
    if kind.bits < 8:
        ratio = _without_nan(ratio)
    return to_float(ratio, kind.storage_dtype)


def whole_scale(scale: jax.Array, global_scale: jax.Array | None) -> jax.Array:
    """Return ``scale * global_scale`` as float32, of the scale's shape."""
    scale = scale if scale.dtype == jnp.float32 else scale.astype(jnp.float32)
    return scale if global_scale is None else scale * global_scale


def to_float(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Return an array in a smaller float dtype, rounded to nearest, ties to even.

    XLA drops a conversion to fewer bits and back, on GPUs (its pass ``simplify-fp-conversions``,
    where ``xla_allow_excess_precision`` is set, as it is by default): what is quantized and used in
    one program would not be rounded. So the numbers are rounded before they are converted.
    """
    wide, info = jnp.finfo(x.dtype), jnp.finfo(dtype)
    if info.nmant == 0 or info.bits >= wide.bits:  # powers of two, which are computed as such
        return x.astype(dtype)
    rounded = lax.reduce_precision(x, wide.nexp, info.nmant)
    if info.minexp > wide.minexp:
        # Subnormal numbers have the steps of the least normal ones.
        step = 2.0 ** (int(info.minexp) - int(info.nmant))
        small = lax.round(x / step, lax.RoundingMethod.TO_NEAREST_EVEN) * step
        least = lax.full_like(x, 2.0 ** int(info.minexp))
        rounded = lax.select(lax.abs(x) < least, small, rounded)
    return rounded.astype(dtype)


def decode(qvalue: jax.Array, kind: QType, dtype: np.dtype) -> jax.Array:
    """Return what quantized values stand for, without zero point and scale."""
    if kind.codebook is None:
        return qvalue.astype(dtype)
    table = jnp.asarray(kind.codebook, dtype)
    return table.at[qvalue.astype(jnp.int32)].get(mode="promise_in_bounds")


def _ratio(values: jax.Array, scale: jax.Array, kind: QType) -> jax.Array:
    """Return ``values / scale``, without NaN where both are infinite."""
    if values.dtype == jnp.float64:
        largest = float(jnp.finfo(jnp.float32).max)
        return values / _at_most(scale, largest).astype(values.dtype)
    if kind.qmax < 4:
        # With so small a qmax, finite values may have scales beyond the largest divisor.
        shrink = lax.select(
            scale > 2.0**100, lax.full_like(scale, 2.0**-8), lax.full_like(scale, 1.0)
        )
        values, scale = values * shrink, scale * shrink
    # An infinite scale would make NaN of the infinities; divided by this, they go to ±qmax.
    return values / _at_most(scale, _LARGEST_DIVISOR)


def _at_most(scale: jax.Array, largest: float) -> jax.Array:
    """Clamp a scale between 0 and a number; a NaN stays."""
    return lax.clamp(np.float32(0), scale, np.float32(largest))


def _without_nan(x: jax.Array) -> jax.Array:
    return lax.select(lax.eq(x, x), x, lax.full_like(x, 0))


def _round_at_random(ratio: jax.Array, noise: jax.Array, kind: QType) -> jax.Array:
    """Round to a float format, with noise in units of last place."""
    if kind.codebook is not None:
        raise ValueError(
            f"a qtype must have even steps to round between at random, got {kind.name!r}. Use "
            "rounding=None, or an integer or float qtype."
        )
    # Rounded here, on the grid of the ratio's own binade: after the noise it could be in the
    # binade below, whose finer grid would make the rounding biased.
    info = jnp.finfo(kind.storage_dtype)
    exponent = lax.max(power_of_two(ratio), lax.full_like(ratio, 2.0 ** int(info.minexp)))
    ulp = exponent * (2.0 ** -int(info.nmant))
    return lax.round(ratio / ulp + noise, lax.RoundingMethod.TO_NEAREST_EVEN) * ulp


def power_of_two(x: jax.Array) -> jax.Array:
    """Return the largest power of two up to ``|x|``.

    It is 0 for subnormals, inf for inf, and NaN for NaN.
    """
    wide = x.dtype == jnp.float64
    mask = 0x7FF << 52 if wide else 0xFF << 23
    bits = lax.bitcast_convert_type(x, jnp.uint64 if wide else jnp.uint32)
    return lax.bitcast_convert_type(lax.bitwise_and(bits, lax.full_like(bits, mask)), x.dtype)


def _nearest(x: jax.Array, codebook: tuple[float, ...]) -> jax.Array:
    """Return the index of the nearest entry, int32; ties go down."""
    entries = np.asarray(codebook, np.float64)
    middles = jnp.asarray((entries[1:] + entries[:-1]) / 2, x.dtype)
    above = lax.expand_dims(x, (x.ndim,)) > lax.expand_dims(middles, tuple(range(x.ndim)))
    return above.astype(jnp.int32).sum(-1, dtype=jnp.int32)


_ROTATIONS = (13, 15, 26, 6), (17, 29, 16, 24)
_MANTISSA = 23


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class StochasticRounding:
    """Rounding up or down at random, unbiased inside the range.

    See Gupta et al. 2015, "Deep Learning with Limited Numerical Precision" (arXiv:1502.02551),
    section 2.2. A pytree whose leaf is the key: draw a new key for every use.

    Attributes:
      key: a JAX random key.
      method: "uniform", or "low_bit_uniform", which draws 8 random bits per element instead of
        32 and is unbiased to within 1/512 of a step.
      channelwise_noise_axes: axes along which each index has different noise; elements that
        differ only along other axes share it.
    """

    key: jax.Array
    method: Literal["uniform", "low_bit_uniform"] = dataclasses.field(
        default="uniform", metadata={"static": True}
    )
    channelwise_noise_axes: tuple[int, ...] = dataclasses.field(
        default=(0,), metadata={"static": True}
    )

    def drawn(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Return the shape of the noise for an array of a shape.

        Raises:
          ValueError: a noise axis that `shape` doesn't have.
        """
        axes = set()
        for axis in self.channelwise_noise_axes:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"channelwise_noise_axes must be axes of shape {tuple(shape)}, got {axis}. "
                    "Choose others, or () for one number for all."
                )
            axes.add(axis % len(shape))
        return tuple(n if a in axes else 1 for a, n in enumerate(shape))

    def noise(self, shape: Sequence[int]) -> jax.Array:
        """Return float32 noise between -1/2 and 1/2.

        It depends on the key and an element's index in the whole array, also if that is sharded
        (inside ``shard_map``, on its index in the shard).

        Args:
          shape: of the array that is rounded. Noise has that size along `channelwise_noise_axes`,
            and size 1 along the other axes.

        Raises:
          ValueError: an unknown method, or a noise axis that `shape` doesn't have.
        """
        drawn = self.drawn(shape)
        if self.method not in ("uniform", "low_bit_uniform"):
            raise ValueError(
                "the method of rounding must be 'uniform' or 'low_bit_uniform', got "
                f"{self.method!r}. Choose one of them."
            )
        is_shared = drawn != tuple(shape)
        # A program that fused the bits would draw them again for each element that shares them.
        bits = jax.random.bits(self.key, drawn) if is_shared else random_bits(self.key, drawn)
        if self.method == "low_bit_uniform":
            low = lax.bitwise_and(bits, lax.full_like(bits, 0xFF)).astype(jnp.int32)
            return (low.astype(jnp.float32) + 0.5) / 256.0 - 0.5
        # Signed, which processors convert to float in one instruction.
        high = lax.shift_right_logical(bits, lax.full_like(bits, 32 - _MANTISSA)).astype(jnp.int32)
        noise = high.astype(jnp.float32) * 2.0**-_MANTISSA - 0.5
        # Exactly -1/2 would move a number that needs no rounding.
        return lax.max(noise, lax.full_like(noise, -0.5 + 2.0**-24))


def key_words(key: jax.Array) -> jax.Array:
    """Return two uint32 words that say which random bits one key gives.

    Those of a "threefry2x32" key are its own, and depend on all words of another.
    """
    words = jax.random.key_data(key)
    if words.ndim != 1:
        raise ValueError(
            f"key must be one random key, got an array of shape {words.shape[:-1]}. Map over them "
            "with jax.vmap."
        )
    words = lax.pad(words, np.uint32(0), [(0, words.size % 2, 0)])
    pair = words[:2]
    for i in range(2, words.size, 2):
        pair = jnp.stack(_threefry(words[i], words[i + 1], (pair[0], pair[1])))
    return pair


def random_bits(key: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Return random uint32 numbers, drawn inside the loop that uses them.

    They are those of ``jax.random.bits`` with a "threefry2x32" key and
    ``jax_threefry_partitionable``: the two words that Threefry 2x32-20 (Salmon et al. 2011,
    "Parallel random numbers: as easy as 1, 2, 3") makes of an element's index, combined by xor. For
    CPUs, JAX writes Threefry as a loop over whole arrays, which takes four times as long.
    """
    words = key_words(key)
    count = math.prod(shape)
    if not isinstance(count, int) or count >= 2**32:
        # An index in two words, or of unknown size.
        whole = jax.random.wrap_key_data(words, impl="threefry2x32")
        return jax.random.bits(whole, shape)
    index = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        index += lax.broadcasted_iota(jnp.uint32, shape, axis) * np.uint32(
            math.prod(shape[axis + 1 :])
        )
    first, second = _threefry(lax.full_like(index, 0), index, (words[0], words[1]))
    return lax.bitwise_xor(first, second)


def _threefry(
    x: jax.Array, y: jax.Array, key: tuple[jax.Array, jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Return two random words for each counter of two words."""
    keys = (*key, key[0] ^ key[1] ^ jnp.uint32(0x1BD11BDA))
    x, y = x + keys[0], y + keys[1]
    for i in range(5):
        for rotation in _ROTATIONS[i % 2]:
            x = x + y
            y = (y << rotation | y >> 32 - rotation) ^ x
        x, y = x + keys[(i + 1) % 3], y + (keys[(i + 2) % 3] + jnp.uint32(i + 1))
    return x, y
