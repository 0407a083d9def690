"""What a kernel adds to a contraction's result: a bias, a residual, or both."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Added(NamedTuple):
    """What is added to a contraction's result, each sum rounded to the result's dtype.

    Attributes:
        bias: [n], repeated along all axes but the last; None for none.
        residual: of the result's shape, added after the bias; None for none.
    """

    bias: jax.Array | None = None
    residual: jax.Array | None = None

    def to(self, y: jax.Array) -> jax.Array:
        """Return the sum."""
        if self.bias is not None:
            y = y + jnp.expand_dims(self.bias, range(y.ndim - 1))
        return y if self.residual is None else y + self.residual

    @property
    def options(self) -> dict[str, jax.Array]:
        """Return what there is, by the name that kernels' ops have for it."""
        return {name: array for name, array in self._asdict().items() if array is not None}

    def in_batch(
        self, is_mapped: Added, size: int, kept: Sequence[int]
    ) -> tuple[Added, tuple[jax.Array, ...]]:
        """Return what is added to the results of a batch, whose axis is first.

        A bias that the batch shares is added to all rows. A mapped one differs from row to row, as
        a residual does.

        Args:
            is_mapped: whether each array has an axis of the batch, its first; not read for None.
            size: of the batch.
            kept: sizes of the axes of one result, but for the last.

        Returns:
            What a kernel adds, and the arrays of the batch's shape that are added after it.
        """
        bias, residuals = self.bias, [] if self.residual is None else [self.residual]
        if bias is not None and is_mapped.bias:
            row = bias.reshape(size, *(1 for _ in kept), bias.shape[-1])
            bias, residuals = None, [row, *residuals]
        whole = [jnp.broadcast_to(x, (size, *kept, x.shape[-1])) for x in residuals]
        return Added(bias, *whole[:1]), tuple(whole[1:])


NOTHING = Added()
