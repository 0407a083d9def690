"""Einsum for training, on top of train_dot_general."""

from typing import Any

import jax
from jax.typing import ArrayLike, DTypeLike

from quant_numerics.ops.arithmetic import output_dtype
from quant_numerics.ops.subscripts import (
    before_transpose,
    check_sizes,
    diagonals,
    dimension_numbers,
    parse,
    squeeze,
    sum_lone,
)
from quant_numerics.train.dot import train_dot_general
from quant_numerics.train.options import check_operands


def train_einsum(
    spec: str,
    lhs: ArrayLike,
    rhs: ArrayLike,
    *,
    lhs_how: Any,
    rhs_how: Any,
    lhs_calibration: Any = None,
    rhs_calibration: Any = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    **options: Any,
) -> jax.Array:
    """Quantize two operands and compute their einsum, with derivatives.

    It is one ``train_dot_general``, which has the same derivatives, and a transpose. A label that
    only one operand has, and the output doesn't, is summed before quantizing. If one operand has a
    label twice, its diagonal is taken before quantizing.

    Args:
      spec: subscripts of two operands, e.g. ``"btd,df->btf"``.
      lhs: bfloat16, float16, float32 or float64 array.
      rhs: the same.
      lhs_how: as in ``train_dot_general``, like the arguments after it.
      rhs_how: as there.
      lhs_calibration: as there.
      rhs_calibration: as there.
      preferred_element_type: as there.
      out_sharding: as there.
      **options: ``backward``, ``cotangent_calibration``, ``key`` and ``precision``, as there.

    Raises:
      ValueError: a malformed spec, or one of another number of operands; as
        ``train_dot_general``; a calibration for an operand that is summed or of which the diagonal
        is taken.
      TypeError: an operand that is not a float array.
    """
    operands = check_operands((lhs, rhs), (lhs_how, rhs_how), (lhs_calibration, rhs_calibration))
    terms, out = parse(spec, [x.ndim for x in operands])
    check_sizes(spec, operands, terms)
    dtype = output_dtype(*operands, preferred_element_type)

    (left, in_l), (right, in_r) = map(diagonals, operands, terms)
    sizes_l = dict(zip(in_l, left.shape, strict=True))
    sizes_r = dict(zip(in_r, right.shape, strict=True))
    left, in_l = squeeze(left, in_l, {c for c in in_r if sizes_r[c] != sizes_l.get(c)})
    right, in_r = squeeze(right, in_r, {c for c in in_l if sizes_l[c] != sizes_r.get(c)})
    left, in_l = sum_lone(left, in_l, in_r + out)
    right, in_r = sum_lone(right, in_r, in_l + out)
    for name, given, changed in (
        ("lhs", lhs_calibration, (left.ndim, operands[0].ndim)),
        ("rhs", rhs_calibration, (right.ndim, operands[1].ndim)),
    ):
        if given is not None and changed[0] != changed[1]:
            raise ValueError(
                f"axes of {name} must be contracted or kept where {name}_calibration is given, got "
                f"einsum {spec!r}. Sum them before, and measure the range of that."
            )

    dims = dimension_numbers(in_l, in_r, out)
    batch = "".join(in_l[a] for a in dims[1][0])
    labels = batch + "".join(c for c in in_l + in_r if c in out and c not in batch)
    order = [labels.index(c) for c in out]
    assert isinstance(left, jax.Array)
    assert isinstance(right, jax.Array)
    result = train_dot_general(
        left,
        right,
        dims,
        lhs_how=lhs_how,
        rhs_how=rhs_how,
        lhs_calibration=lhs_calibration,
        rhs_calibration=rhs_calibration,
        preferred_element_type=dtype,
        out_sharding=before_transpose(out_sharding, order),
        **options,
    )
    return result if order == sorted(order) else result.transpose(order)
