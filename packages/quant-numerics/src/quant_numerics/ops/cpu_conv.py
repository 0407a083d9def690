"""Integer convolutions on CPU, where XLA has no fast ones."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

FLOAT32_EXACT = 2**24
"""All integers up to this are float32 numbers."""
_MOST_PARTS = 16


def int_conv(
    conv: Callable[[jax.Array, jax.Array], jax.Array],
    float_conv: Callable[[jax.Array, jax.Array], jax.Array],
    lhs: jax.Array,
    rhs: jax.Array,
    feature_axes: tuple[int, int] | None,
    terms: tuple[int, int],
    largest: int,
) -> jax.Array:
    """Convolve integers whose sums fit in int32, with a float32 result.

    XLA's CPU backend computes integer convolutions in a plain loop, ten to twenty times slower than
    float32 ones. For programs lowered for CPU, sums of so few products that float32 holds them
    exactly are taken in float32: of all input features, or of parts of them that are added in
    int32. The result is the same, bit for bit.

    Args:
      conv: the convolution with int32 sums.
      float_conv: the same convolution of float32 arrays.
      lhs: the input, integers.
      rhs: the kernel, integers.
      feature_axes: the axes of input features in both, or None if they can't be cut.
      terms: how many window elements, and how many input features, a sum goes over.
      largest: the largest magnitude of a product.
    """

    def plain(a: jax.Array, b: jax.Array) -> jax.Array:
        return conv(a, b).astype(jnp.float32)

    window, features = terms
    step = FLOAT32_EXACT // (largest * max(window, 1))
    if step < features and (feature_axes is None or step * _MOST_PARTS < features):
        return plain(lhs, rhs)

    def in_floats(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)
        if step >= features:
            return float_conv(a, b)
        assert feature_axes is not None
        total = None
        for start in range(0, features, step):
            stop = min(start + step, features)
            part = float_conv(
                lax.slice_in_dim(a, start, stop, axis=feature_axes[0]),
                lax.slice_in_dim(b, start, stop, axis=feature_axes[1]),
            ).astype(jnp.int32)
            total = part if total is None else total + part
        assert total is not None
        return total.astype(jnp.float32)

    return lax.platform_dependent(lhs, rhs, cpu=in_floats, default=plain)
