"""Stochastic rounding: noise that is added before rounding to nearest."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

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
