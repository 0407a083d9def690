"""What a product with packed weights knows at compile time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax import lax

from .layout import Layout
from .packed import PackedWeight


@dataclasses.dataclass(frozen=True)
class Form:
    """What a product knows of its weight and its result at compile time. Hashable.

    Attributes:
        op: its name.
        layout: of the weight, or of each of a stack.
        n: columns.
        dtype: of the result.
        picks: "" for one weight; "stack" for that of an index, which is the last operand;
            "groups" for each of a stack with its group of rows, whose sizes are.
    """

    op: str
    layout: Layout
    n: int
    dtype: Any
    picks: str

    def weight(self, buffer: jax.Array, *index: jax.Array) -> PackedWeight:
        """Return the weight of a buffer, or that of an index of a stack."""
        for i in index:
            buffer = lax.dynamic_index_in_dim(buffer, i, keepdims=False)
        return PackedWeight.of(buffer, self.n, self.layout)
