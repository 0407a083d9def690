"""dot and matmul of QArrays, with the shapes of jax.numpy's."""

from typing import Any

import jax
from jax.typing import DTypeLike

from quant_numerics.array.operand import Operand, as_operand, dequantize
from quant_numerics.array.qarray import QArray
from quant_numerics.ops.arithmetic import output_dtype
from quant_numerics.ops.dot import dot_general
from quant_numerics.ops.einsum import einsum


def dot(
    a: Operand,
    b: Operand,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Multiply like ``jax.numpy.dot``; either side may be a QArray.

    Contracts the last axis of `a` with the last but one (or only) axis of `b`; where either has no
    axes, it multiplies (and a QArray is dequantized). See ``dot_general`` for all arguments.

    Raises:
      TypeError: sizes that differ, or a side that is neither a QArray nor a supported float array.
    """
    a, b = as_operand(a, "lhs"), as_operand(b, "rhs")
    if a.ndim == 0 or b.ndim == 0:
        dtype = output_dtype(a, b, preferred_element_type)
        a, b = ((dequantize(x) if isinstance(x, QArray) else x).astype(dtype) for x in (a, b))
        return a * b
    dims = (((a.ndim - 1,), (max(b.ndim - 2, 0),)), ((), ()))
    return dot_general(
        a,
        b,
        dims,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )


def matmul(
    a: Operand,
    b: Operand,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Multiply like ``jax.numpy.matmul``; either side may be a QArray.

    The last two axes are matrices (one axis: a vector), those before broadcast. See
    ``dot_general`` for all arguments.

    Raises:
      ValueError: a side without axes, or sizes that differ.
      TypeError: a side that is neither a QArray nor a supported float array.
    """
    a, b = as_operand(a, "lhs"), as_operand(b, "rhs")
    if a.ndim == 0 or b.ndim == 0:
        raise ValueError(
            "the operands of matmul must have at least one axis, got shapes "
            f"{a.shape} and {b.shape}. Multiply by a scalar with *."
        )
    if a.shape[-1] != b.shape[max(b.ndim - 2, 0) - b.ndim]:
        raise ValueError(
            "the last axis of the lhs and the last but one, or only, axis of the rhs of matmul "
            f"must have equal sizes, got shapes {a.shape} and {b.shape}. Transpose one of them."
        )
    left, right = "j" if a.ndim == 1 else "...ij", "j" if b.ndim == 1 else "...jk"
    out = "..." + "i" * (a.ndim > 1) + "k" * (b.ndim > 1)
    out = out if max(a.ndim, b.ndim) > 1 else ""
    return einsum(
        f"{left},{right}->{out}",
        a,
        b,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
