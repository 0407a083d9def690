"""Stochastic rounding: noise that is added before rounding to nearest."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax


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

    def noise(self, shape: Sequence[int]) -> jax.Array:
        """Return float32 noise between -1/2 and 1/2.

        Args:
          shape: of the array that is rounded. Noise has that size along `channelwise_noise_axes`,
            and size 1 along the other axes.

        Raises:
          ValueError: an unknown method, or a noise axis that `shape` doesn't have.
        """
        axes = set()
        for axis in self.channelwise_noise_axes:
            if not -len(shape) <= axis < len(shape):
                raise ValueError(
                    f"channelwise_noise_axes must be axes of shape {tuple(shape)}, got {axis}. "
                    "Choose others, or () for one number for all."
                )
            axes.add(axis % len(shape))
        drawn = tuple(n if a in axes else 1 for a, n in enumerate(shape))
        if self.method == "uniform":
            noise = jax.random.uniform(self.key, drawn, jnp.float32, -0.5, 0.5)
            # Exactly -1/2 would move a number that needs no rounding.
            return lax.max(noise, lax.full_like(noise, -0.5 + 2.0**-24))
        if self.method == "low_bit_uniform":
            bits = jax.random.bits(self.key, drawn, jnp.uint8).astype(jnp.float32)
            return (bits + 0.5) / 256.0 - 0.5
        raise ValueError(
            "the method of rounding must be 'uniform' or 'low_bit_uniform', got "
            f"{self.method!r}. Choose one of them."
        )
