"""Einsum of any number of operands, on top of dot_general."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import opt_einsum
from jax.typing import DTypeLike

from quant_numerics.array.operand import Operand, as_operand, dequantize
from quant_numerics.array.qarray import QArray
from quant_numerics.formats.dtypes import float_dtype, promote_floats
from quant_numerics.ops.dot import dot_general
from quant_numerics.ops.subscripts import (
    DimensionNumbers,
    as_dot,
    before_transpose,
    check_sizes,
    diagonals,
    dimension_numbers,
    from_interleaved,
    parse,
    sum_lone,
)


def einsum(
    spec: str | Operand,
    *operands: Any,
    optimize: str | bool | Sequence[tuple[int, ...]] = "auto",
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
) -> jax.Array:
    """Compute ``jax.numpy.einsum`` of operands, any of which may be a QArray.

    Two operands are one ``dot_general`` and a transpose; see there for accumulation, scales and
    dtypes. More are contracted two at a time in an order of opt_einsum's; what comes out on the
    way is a float array of the output's dtype. One operand is dequantized.

    As in NumPy, the output may be implicit, ``...`` stands for broadcast axes, and an axis of size
    1 broadcasts against the other operand's. A label that only one operand has and the output has
    not is summed first, in that operand alone, and of a label that one operand has twice the
    diagonal is taken: a QArray is dequantized for both, so this costs that side its integer
    arithmetic.

    Args:
      spec: subscripts, e.g. ``"bqhd,bkhd->bhqk"``. Or the interleaved form: operands and lists of
        integer labels by turns, then maybe the output's, ``einsum(x, [0, 1], w, [1, 2], [0, 2])``.
      *operands: QArrays or arrays of bfloat16, float16, float32 or float64.
      optimize: how to find an order for three or more operands, as in ``jax.numpy.einsum``: a
        strategy of opt_einsum's, False for left to right, or a path.
      precision: as in ``dot_general``.
      preferred_element_type: as in ``dot_general``.
      out_sharding: sharding of the output, a NamedSharding or PartitionSpec.

    Raises:
      ValueError: a malformed spec; another number of operands than it has; sizes that differ;
        different tiles along a contracted label.
      TypeError: an operand that is neither a QArray nor a supported float array.
    """
    if not isinstance(spec, str):
        spec, operands = from_interleaved((spec, *operands))
    two = len(operands) == 2
    arrays = [
        as_operand(x, ("lhs", "rhs")[i] if two else f"operand {i}") for i, x in enumerate(operands)
    ]
    terms, out = parse(spec, [x.ndim for x in arrays])
    check_sizes(spec, arrays, terms)
    if preferred_element_type is not None:
        dtype = float_dtype(preferred_element_type, "preferred_element_type")
    else:
        dtype = functools.reduce(promote_floats, (x.dtype for x in arrays))

    for i, (x, term) in enumerate(zip(arrays, terms, strict=True)):
        arrays[i], terms[i] = diagonals(x, term)
    path = _path(arrays, terms, out, optimize) if len(arrays) > 2 else [tuple(range(len(arrays)))]
    for step, places in enumerate(path):
        last = step == len(path) - 1
        chosen = [(arrays.pop(i), terms.pop(i)) for i in sorted(places, reverse=True)][::-1]
        (x, labels), *others = chosen
        if not others:
            return _alone(x, labels, out, dtype)
        for i, (right, in_r) in enumerate(others):  # a path may name more than two at once
            later = [t for _, t in others[i + 1 :]] + terms
            kept = "".join(
                c for c in dict.fromkeys(labels + in_r) if c in out or any(c in t for t in later)
            )
            final = last and i == len(others) - 1
            kept = out if final else kept
            sharding = out_sharding if final else None
            x = _two(x, labels, right, in_r, kept, dtype, precision, sharding)
            labels = kept
        arrays.append(x)
        terms.append(labels)
    (result,) = arrays
    assert not isinstance(result, QArray)
    return result


def _two(
    left: QArray | jax.Array,
    in_l: str,
    right: QArray | jax.Array,
    in_r: str,
    out: str,
    dtype: np.dtype,
    precision: Any,
    out_sharding: Any,
) -> jax.Array:
    """Compute an einsum of two operands without repeated labels."""
    left, right, dims, order = as_dot((left, in_l), (right, in_r), out)
    result = dot_general(
        left,
        right,
        dims,
        precision=precision,
        preferred_element_type=dtype,
        out_sharding=before_transpose(out_sharding, order),
    )
    return result if order == sorted(order) else result.transpose(order)


def _alone(x: QArray | jax.Array, labels: str, out: str, dtype: np.dtype) -> jax.Array:
    """Compute an einsum of one operand without repeated labels."""
    x, labels = sum_lone(dequantize(x) if isinstance(x, QArray) else x, labels, out)
    assert not isinstance(x, QArray)
    return x.transpose([labels.index(c) for c in out]).astype(dtype)


def _path(
    arrays: Sequence[QArray | jax.Array], terms: Sequence[str], out: str, optimize: Any
) -> list[tuple[int, ...]]:
    """Return the operands to contract in each step.

    Results go to the end of the list.
    """
    if optimize is False:
        return [(0, 1), *((0, len(arrays) - 2 - i) for i in range(len(arrays) - 2))]
    sizes: dict[str, int] = {}
    for x, term in zip(arrays, terms, strict=True):
        for c, n in zip(term, x.shape, strict=True):
            sizes[c] = n if sizes.get(c, 1) == 1 else sizes[c]
    shapes = [tuple(sizes[c] for c in term) for term in terms]
    # Like jax.numpy: "auto" is exhaustive for few operands.
    strategy = "optimal" if optimize is True else optimize
    path, _ = opt_einsum.contract_path(
        f"{','.join(terms)}->{out}", *shapes, shapes=True, optimize=strategy
    )
    return [tuple(step) for step in path]


def einsum_dimension_numbers(spec: str, lhs_ndim: int, rhs_ndim: int) -> DimensionNumbers:
    """Return the dimension numbers of the contraction in a two-operand einsum.

    For a caller that quantizes operands before ``einsum`` and must know which axes contract.

    Args:
      spec: subscripts with exactly one comma, and no label twice in an operand.
      lhs_ndim: number of axes of the first operand.
      rhs_ndim: number of axes of the second operand.

    Returns:
      ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``, in axes of the operands as
      given, in the order of the first operand's labels. An axis that is summed within one operand
      alone is in neither.

    Raises:
      ValueError: as ``einsum``, as far as ndims tell.
    """
    terms, out = parse(spec, (lhs_ndim, rhs_ndim))
    if any(len(set(term)) != len(term) for term in terms):
        raise ValueError(
            f"the operands of einsum {spec!r} must have no label twice, got {terms}. Leave them "
            "unquantized: einsum takes the diagonal in float."
        )
    return dimension_numbers(terms[0], terms[1], out)
