"""The static arguments of gemm_v2, checked."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.typing import DTypeLike

from .. import checks
from ..quantize import arguments
from ..quantize.modes import ScalingMode
from .sides import Side, check_pair, check_side, side


@dataclasses.dataclass(frozen=True)
class GemmConfig:
    """The static arguments of gemm_v2; gemm has more."""

    out_dtype: Any
    mode: ScalingMode
    left: Side
    right: Side
    use_split_accumulator: bool = False
    fuse_gelu: bool = False
    has_bias: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the result."""
        return (*self.left.kept_shape, *self.right.kept_shape)

    @property
    def result(self) -> jax.ShapeDtypeStruct:
        """Return the type of the result."""
        return jax.ShapeDtypeStruct(self.shape, self.out_dtype)

    def block(self, lhs: tuple[int, ...], rhs: tuple[int, ...]) -> GemmConfig:
        """Return the config for blocks of the factors, of these shapes."""
        return dataclasses.replace(
            self,
            left=dataclasses.replace(self.left, shape=lhs),
            right=dataclasses.replace(self.right, shape=rhs),
        )

    def attributes(self) -> dict[str, Any]:
        """Return the attributes of the FFI call."""
        return {
            "scaling_mode": int(self.mode),
            "collective_op": 0,
            "lhs_axis_boundary": self.left.boundary,
            "rhs_axis_boundary": self.right.boundary,
            "lhs_transposed": self.left.leading,
            "rhs_transposed": not self.right.leading,
            "use_split_accumulator": self.use_split_accumulator,
        } | ({"fuse_gelu": True} if self.fuse_gelu else {})


class Attributes(dict):
    """An immutable, hashable dictionary, which caches can use as a key."""

    def __hash__(self) -> int:  # pyrefly: ignore
        """Return the hash of the entries."""
        return hash(tuple(sorted(self.items())))


def gemm_config(
    op: str,
    lhs: jax.Array,
    lhs_scale_inv: jax.Array,
    rhs: jax.Array,
    rhs_scale_inv: jax.Array,
    bias: jax.Array,
    alpha: jax.Array,
    beta: jax.Array,
    out_dtype: DTypeLike,
    contracting_dims: tuple[Sequence[int], Sequence[int]],
    scaling_mode: Any,
    use_split_accumulator: bool,
    collective_op: Any,
    *,
    fuse_gelu: bool,
    needs_bias: bool = False,
) -> GemmConfig:
    """Check the arguments of gemm_v2 against each other, and return the config.

    The arguments are those of ``gemm_v2``; `op` is the name in errors, and with `needs_bias` an
    empty bias is refused.

    Raises:
        TypeError, ValueError, NotImplementedError: as ``te_ffi_kernels.gemm_v2``.
    """
    mode = arguments.scaling_mode(op, scaling_mode, quantized=False)
    collective = getattr(collective_op, "value", collective_op)
    if collective != 0:
        raise NotImplementedError(
            f"{op}: collective_op must be 0 (none), got {collective_op!r}. Matmuls that "
            "communicate are for GPUs. Shard the operands, and XLA communicates"
        )
    left = side(op, "lhs", lhs, contracting_dims[0])
    right = side(op, "rhs", rhs, contracting_dims[1])
    check_side(op, "lhs", lhs, lhs_scale_inv, left, mode)
    check_side(op, "rhs", rhs, rhs_scale_inv, right, mode)
    check_pair(op, lhs, rhs, left, right, mode)
    dtype = checks.dtype(op, "out_dtype", out_dtype, checks.FLOATS)
    if bias.size > 0 or needs_bias:
        checks.shape(op, "bias", bias, right.kept_shape, "the axes of rhs that are kept, or (0,)")
        checks.dtype(op, "bias", bias.dtype, (dtype,))
    arguments.number(op, "alpha", alpha)
    arguments.number(op, "beta", beta)
    return GemmConfig(
        dtype, mode, left, right, use_split_accumulator, fuse_gelu, has_bias=bias.size > 0
    )
