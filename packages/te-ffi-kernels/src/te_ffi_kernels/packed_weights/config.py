"""Form: what a product with packed weights knows at compile time, and its checks."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .layout import Layout
from .weight import PackedWeight


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


def check(
    op: str,
    bits: int,
    x: jax.Array,
    weight: PackedWeight,
    dtype: Any,
    index: ArrayLike | None,
    group_sizes: jax.Array | None,
) -> None:
    """Raise where arguments are not those of ``gemm_w8a8``."""
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"{op}: weight is a {type(weight).__name__}, and must be a PackedWeight: pack it once "
            f"with pack_w{bits}(codes, scale)"
        )
    if weight.bits != bits:
        raise ValueError(
            f"{op}: weight is packed in {weight.bits} bits, and must be in {bits}: pack it with "
            f"pack_w{bits}"
        )
    try:
        weight.check()
    except ValueError as error:
        raise ValueError(f"{op}: weight: {error}") from None
    _check_stack(op, x, weight.shape[:-2], index, group_sizes)
    for name, given in (("x", x.dtype), ("out_dtype", dtype)):
        if given not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise TypeError(f"{op}: {name} is {given}, and must be float32, bfloat16 or float16")
    if x.ndim == 0 or x.shape[-1] != weight.k:
        raise ValueError(
            f"{op}: x has shape {x.shape}, and its last axis must have the {weight.k} rows of the "
            "weight"
        )


def _check_stack(
    op: str,
    x: jax.Array,
    lead: tuple[int, ...],
    index: ArrayLike | None,
    group_sizes: jax.Array | None,
) -> None:
    if index is None and group_sizes is None:
        if lead:
            raise ValueError(
                f"{op}: weight is a stack of shape {lead}; give the index of one of its weights, "
                "or group_sizes, or vmap or scan over it"
            )
        return
    if index is not None and group_sizes is not None:
        raise ValueError(f"{op}: give an index or group_sizes, not both")
    if len(lead) != 1 or lead[0] == 0:
        raise ValueError(
            f"{op}: weight must be a stack along one axis where there is an index or group_sizes, "
            f"got a stack of shape {lead}"
        )
    if index is not None:
        if jnp.shape(index) != () or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
            raise TypeError(f"{op}: index must be a scalar integer, got {jnp.asarray(index).aval}")
        return
    sizes = jnp.asarray(group_sizes)
    if sizes.shape != lead or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(
            f"{op}: group_sizes must be integers of shape {lead}, one for each weight of the "
            f"stack, got {jax.typeof(sizes)}"
        )
    if x.ndim != 2:
        raise ValueError(f"{op}: x must be [rows, k] where there are group_sizes, got {x.shape}")
