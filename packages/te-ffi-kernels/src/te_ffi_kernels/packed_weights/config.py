"""Form: static options of matmuls with packed weights, and checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

from .. import checks
from .layout import Layout
from .weight import PackedWeight


@dataclasses.dataclass(frozen=True)
class Form:
    """A matmul's weight layout and result type. Hashable.

    Attributes:
        op: name of the op.
        layout: layout of the weight, or of each weight of a stack.
        n: columns of the weight.
        dtype: dtype of the result.
        picks: "" for one weight; "stack" for one of a stack, by an index after it; "groups" for
            one per group of rows, by indices and sizes of groups after the stack.
        rotation: size of the blocks in which rows are rotated, with signs as an operand after
            those; 0 for none.
        has_scale: whether rows have a scale that is given; an operand after the signs.
        has_bias: whether a bias [n] is added; an operand after these.
        has_residual: whether an array as large as the result is added then: the last operand.
        clamp: two numbers between which results are cut in the end, or None.
    """

    op: str
    layout: Layout
    n: int
    dtype: Any
    picks: str
    rotation: int = 0
    has_scale: bool = False
    has_bias: bool = False
    has_residual: bool = False
    clamp: tuple[float, float] | None = None

    @property
    def told(self) -> dict[str, Any]:
        """Return what kernels are told and asked about a call beside its weight.

        What a call does not have is left out: a kernel that knows none of these takes plain calls.
        """
        told = {
            "index": self.picks != "",
            "group_sizes": self.picks == "groups",
            "rotation": self.rotation,
            "x_scale": self.has_scale,
            "bias": self.has_bias,
            "residual": self.has_residual,
        }
        clamps = {} if self.clamp is None else clamp_attributes(self.clamp)
        return {name: int(value) for name, value in told.items() if value} | clamps

    @property
    def has_more(self) -> bool:
        """Return whether something is done to a product."""
        return self.has_bias or self.has_residual or self.clamp is not None

    @property
    def plain(self) -> Form:
        """Return the form of the product alone."""
        return dataclasses.replace(self, has_bias=False, has_residual=False, clamp=None)

    def parted(self, given: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """Return the operands after x, and those of them that are added."""
        count = len(given) - self.has_bias - self.has_residual
        return given[:count], given[count:]

    def of_weight(self, given: Sequence[Any]) -> tuple[Sequence[Any], Any, Any]:
        """Return the operands that are the weight's, signs, and the scale of rows; or None."""
        scale = given[-1] if self.has_scale else None
        given = given[:-1] if self.has_scale else given
        return (given[:-1], given[-1], scale) if self.rotation else (given, None, scale)

    def weight(self, buffer: jax.Array, *index: jax.Array) -> PackedWeight:
        """Return the weight in a buffer, or one of a stack."""
        for i in index:
            buffer = lax.dynamic_index_in_dim(buffer, i, keepdims=False)
        return PackedWeight.of(buffer, self.n, self.layout)


def clamp_attributes(clamp: tuple[float, float] | None) -> dict[str, Any]:
    """Return what kernels are told about a clamp."""
    if clamp is None:
        return {"clamps": 0}
    return {"clamps": 1, "least": clamp[0], "most": clamp[1]}


def clamped(y: jax.Array, clamp: tuple[float, float] | None) -> jax.Array:
    """Return numbers cut as kernels cut them."""
    if clamp is None:
        return y
    least, most = (jnp.asarray(bound, y.dtype) for bound in clamp)
    return jnp.minimum(jnp.maximum(y, least), most)


def is_inside(y: jax.Array, clamp: tuple[float, float] | None) -> jax.Array | None:
    """Return where a derivative is not 0: strictly between the bounds; None without."""
    if clamp is None:
        return None
    least, most = (jnp.asarray(bound, y.dtype) for bound in clamp)
    return (y > least) & (y < most)


def check_clamp(op: str, clamp: tuple[float, float] | None) -> tuple[float, float] | None:
    """Return two numbers in their order, or None."""
    if clamp is None:
        return None
    if len(clamp) != 2 or not clamp[0] <= clamp[1]:
        raise ValueError(f"{op}: clamp must be two numbers in their order, got {clamp}")
    return float(clamp[0]), float(clamp[1])


def check(
    op: str,
    bits: int,
    x: jax.Array,
    weight: PackedWeight,
    dtype: Any,
    index: ArrayLike | None,
    group_sizes: jax.Array | None,
) -> None:
    """Check the arguments of a matmul with a packed weight.

    Args:
        op: name of the op, for errors.
        bits: bits of the weights that it takes.
        x: as in ``gemm_w8a8``, like the rest.
        weight: as there.
        dtype: dtype of the result.
        index: as there.
        group_sizes: as there.

    Raises:
        TypeError, ValueError: as ``gemm_w8a8``.
    """
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"{op}: weight must be a PackedWeight, got {type(weight).__name__}. Pack it "
            f"once with pack_w{bits}(qvalue, scale)."
        )
    if weight.bits != bits:
        raise ValueError(
            f"{op}: weight must be packed in {bits} bits, got {weight.bits}. Pack it with "
            f"pack_w{bits}"
        )
    try:
        weight.check()
    except ValueError as error:
        raise ValueError(f"{op}: weight: {error}") from None
    _check_stack(op, x, weight.shape[:-2], index, group_sizes)
    for name, given in (("x", x.dtype), ("out_dtype", dtype)):
        if given not in checks.FLOATS:
            raise TypeError(f"{op}: {name} must be float32, bfloat16 or float16, got {given}")
    if x.ndim == 0 or x.shape[-1] != weight.k:
        raise ValueError(
            f"{op}: the last axis of x must be {weight.k}, the rows of the weight, got shape "
            f"{x.shape}"
        )


def check_rotation(
    op: str, k: int, signs: jax.Array | None, rotation: int, group_sizes: jax.Array | None
) -> None:
    """Raise where a rotation is not one of rows of `k` numbers."""
    if rotation == 0 and signs is None:
        return
    if rotation < 2 or rotation & (rotation - 1) or k % rotation:
        raise ValueError(
            f"{op}: rotation must be 0, or a power of two from 2 that divides the {k} rows of the "
            f"weight, got {rotation}"
        )
    if signs is None or signs.dtype != jnp.int8 or signs.shape != (k,):
        found = None if signs is None else jax.typeof(signs)
        raise ValueError(
            f"{op}: signs must be int8[{k}] where there is a rotation, one for each row of the "
            f"weight, got {found}"
        )
    if group_sizes is not None:
        raise ValueError(f"{op}: rows in groups are not rotated. Rotate x before the call.")


def check_scale(op: str, quantizes: bool, scale: ArrayLike | None, name: str = "x_scale") -> None:
    """Raise where a scale of rows is not one number, or rows have none."""
    if scale is None:
        return
    if not quantizes:
        raise ValueError(f"{op}: {name} must be None, as activations stay floats")
    if jnp.shape(scale) != () or not jnp.issubdtype(jnp.result_type(scale), jnp.floating):  # type: ignore[arg-type]
        raise TypeError(
            f"{op}: {name} must be a scalar float, got {jnp.asarray(scale).aval}. One scale "
            "counts for all rows."
        )


def check_added(
    op: str,
    result: Any,
    bias: jax.Array | None,
    residual: jax.Array | None,
    clamp: tuple[float, float] | None,
    group_sizes: jax.Array | None,
) -> None:
    """Raise where what is done to a result does not fit it."""
    if clamp is not None and group_sizes is not None:
        raise ValueError(f"{op}: clamp does not go with group_sizes. Cut the result of the call.")
    for name, given, shape in (
        ("bias", bias, result.shape[-1:]),
        ("residual", residual, result.shape),
    ):
        if given is None:
            continue
        if group_sizes is not None:
            raise ValueError(f"{op}: {name} does not go with group_sizes. Add it after the call.")
        checks.shape(op, name, given, shape, f"for a result of shape {result.shape}")
        checks.dtype(op, name, given.dtype, (result.dtype,))


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
    if len(lead) != 1 or lead[0] == 0:
        raise ValueError(
            f"{op}: weight must be a stack along one axis where there is an index or group_sizes, "
            f"got a stack of shape {lead}"
        )
    if group_sizes is None:
        if jnp.shape(index) != () or not jnp.issubdtype(jnp.result_type(index), jnp.integer):  # type: ignore[arg-type]
            raise TypeError(f"{op}: index must be a scalar integer, got {jnp.asarray(index).aval}")
        return
    groups = lead if index is None else jnp.shape(index)
    for name, given in (("group_sizes", group_sizes), ("index", index)):
        if given is None:
            continue
        found = jnp.asarray(given)
        if (
            found.shape != groups
            or len(groups) != 1
            or not jnp.issubdtype(found.dtype, jnp.integer)
        ):
            raise ValueError(
                f"{op}: {name} must be integers of shape {groups}, one for each "
                f"{'weight of the stack' if index is None else 'group'}, got {jax.typeof(found)}"
            )
    if x.ndim != 2:
        raise ValueError(f"{op}: x must be [rows, k] where there are group_sizes, got {x.shape}")
