"""Two-operand einsum on top of dot_general."""

from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from opt_einsum import parser

from quant_numerics._dot import dot_general, output_dtype
from quant_numerics._qarray import Operand, QArray, as_operand
from quant_numerics._quantize import dequantize

AxisPair: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
DimensionNumbers: TypeAlias = tuple[AxisPair, AxisPair]


def einsum(
    spec: str,
    lhs: Operand,
    rhs: Operand,
    *,
    precision: Any = None,
    preferred_element_type: DTypeLike | None = None,
) -> jax.Array:
    """``jax.numpy.einsum`` of two operands, either of which may be a QArray.

    It is one ``dot_general`` and a transpose; see there for accumulation, scales and dtypes. As
    in NumPy, the output may be implicit, ``...`` stands for broadcast axes, and an axis of size 1
    broadcasts against the other operand's. A label that only one operand has and the output has
    not is summed first, in that operand alone: a QArray is dequantized for it, so this costs that
    side its integer arithmetic.

    Args:
      spec: subscripts with exactly one comma, e.g. ``"bqhd,bkhd->bhqk"``.
      lhs: QArray or array of bfloat16, float16, float32 or float64.
      rhs: the same.
      precision: as in ``dot_general``.
      preferred_element_type: as in ``dot_general``.

    Raises:
      ValueError: a malformed spec; not two operands; a label repeated within one operand (a
        diagonal); sizes that differ; different tiles along a contracted label.
      TypeError: a side that is neither a QArray nor a supported float array.
    """
    left, right = as_operand(lhs, "lhs"), as_operand(rhs, "rhs")
    in_l, in_r, out = _parse(spec, left.ndim, right.ndim)
    dtype = output_dtype(left, right, preferred_element_type)

    sizes_l = dict(zip(in_l, left.shape, strict=True))
    sizes_r = dict(zip(in_r, right.shape, strict=True))
    for label in set(in_l) & set(in_r):
        if sizes_l[label] != sizes_r[label] and 1 not in (sizes_l[label], sizes_r[label]):
            raise ValueError(
                f"einsum {spec!r}: label {label!r} has size {sizes_l[label]} in the first operand "
                f"(shape {left.shape}) and {sizes_r[label]} in the second (shape {right.shape}); "
                "they must be equal, or one of them 1"
            )
    left, in_l = _squeeze(left, in_l, {c for c in in_r if sizes_r[c] != sizes_l.get(c)})
    right, in_r = _squeeze(right, in_r, {c for c in in_l if sizes_l[c] != sizes_r.get(c)})
    left, in_l = _sum_lone(left, in_l, in_r + out)
    right, in_r = _sum_lone(right, in_r, in_l + out)

    dims = _dimension_numbers(in_l, in_r, out)
    result = dot_general(left, right, dims, precision=precision, preferred_element_type=dtype)
    batch = "".join(in_l[a] for a in dims[1][0])
    labels = batch + "".join(c for c in in_l + in_r if c in out and c not in batch)
    return result.transpose([labels.index(c) for c in out])


def einsum_dimension_numbers(spec: str, lhs_ndim: int, rhs_ndim: int) -> DimensionNumbers:
    """The dimension numbers of the dot product in a two-operand einsum.

    For a caller that quantizes operands before ``einsum`` and must know which axes contract.

    Args:
      spec: subscripts with exactly one comma.
      lhs_ndim: number of axes of the first operand.
      rhs_ndim: number of axes of the second operand.

    Returns:
      ``((lhs_contracting, rhs_contracting), (lhs_batch, rhs_batch))``, in axes of the operands as
      given, in the order of the first operand's labels. An axis that is summed within one operand
      alone is in neither.

    Raises:
      ValueError: as ``einsum``, as far as ndims tell.
    """
    return _dimension_numbers(*_parse(spec, lhs_ndim, rhs_ndim))


def _parse(spec: str, lhs_ndim: int, rhs_ndim: int) -> tuple[str, str, str]:
    """Labels of both operands, one per axis, and of the output."""
    spec = spec.replace(" ", "")
    allowed = (
        "allowed are two operands with letters as labels, each label once per operand, an "
        'optional "..." in each, and an optional "->" with the output, e.g. "...ij,...jk->...ik"'
    )
    if spec.split("->")[0].count(",") != 1:
        raise ValueError(f"einsum {spec!r} does not have exactly two operands; {allowed}")
    if not parser.has_valid_einsum_chars_only(spec):
        raise ValueError(f"einsum {spec!r} has a character that is not a letter; {allowed}")
    ndims = (lhs_ndim, rhs_ndim)
    try:
        inputs, out, _ = parser.parse_einsum_input((spec, *((1,) * n for n in ndims)), shapes=True)
    except ValueError as e:
        raise ValueError(f"einsum {spec!r} of {lhs_ndim} and {rhs_ndim} axes: {e} {allowed}") from e
    terms = inputs.split(",")
    for labels, ndim in zip(terms, ndims, strict=True):
        if len(set(labels)) != len(labels):
            raise ValueError(
                f"einsum {spec!r} repeats a label within one operand, which takes a diagonal and "
                f"is not supported; {allowed}; take the diagonal (jnp.diagonal) before quantizing"
            )
        if len(labels) != ndim:
            raise ValueError(
                f"einsum {spec!r} names {len(labels)} axes of an operand that has {ndim}; {allowed}"
            )
    return terms[0], terms[1], out


def _dimension_numbers(in_l: str, in_r: str, out: str) -> DimensionNumbers:
    shared = [c for c in in_l if c in in_r]
    contract = [c for c in shared if c not in out]
    batch = [c for c in shared if c in out]

    def axes(term: str, labels: list[str]) -> tuple[int, ...]:
        return tuple(term.index(c) for c in labels)

    return (
        (axes(in_l, contract), axes(in_r, contract)),
        (axes(in_l, batch), axes(in_r, batch)),
    )


def _squeeze(
    x: QArray | jax.Array, labels: str, differing: set[str]
) -> tuple[QArray | jax.Array, str]:
    """Drops axes of size 1 whose label is larger in the other operand."""
    axes = [a for a, c in enumerate(labels) if c in differing and x.shape[a] == 1]
    # A QArray's leaves have equal ndims, and size 1 in the codes is size 1 in the scale.
    x = jax.tree.map(lambda leaf: jnp.squeeze(leaf, tuple(axes)), x)
    return x, "".join(c for a, c in enumerate(labels) if a not in axes)


def _sum_lone(x: QArray | jax.Array, labels: str, elsewhere: str) -> tuple[QArray | jax.Array, str]:
    """Sums over axes whose label is nowhere else."""
    axes = [a for a, c in enumerate(labels) if c not in elsewhere]
    if axes:
        x = jnp.sum(dequantize(x) if isinstance(x, QArray) else x, axis=tuple(axes))
    return x, "".join(c for a, c in enumerate(labels) if a not in axes)
