"""Einsum of any number of operands, dot and matmul as jax.numpy's, on top of dot_general."""

import functools
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import opt_einsum
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import DTypeLike
from opt_einsum import parser

from quant_numerics.array import moves
from quant_numerics.array.qarray import Operand, QArray, as_operand, dequantize
from quant_numerics.formats.qtypes import float_dtype, promote_floats
from quant_numerics.ops.arithmetic import output_dtype
from quant_numerics.ops.dot import dot_general

AxisPair: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
DimensionNumbers: TypeAlias = tuple[AxisPair, AxisPair]

_ALLOWED = (
    'Write letters as labels, an optional "..." in each operand, and an optional "->" with '
    'the output, e.g. "...ij,...jk->...ik".'
)


def from_interleaved(operands: Sequence[Any]) -> tuple[str, tuple[Any, ...]]:
    """Return subscripts and operands of the interleaved form."""
    if len(operands) < 2:
        raise ValueError(
            "einsum must be given subscripts and operands, or operands and lists of labels by "
            "turns, got one operand alone. Give both."
        )
    *pairs, out = operands if len(operands) % 2 else (*operands, None)
    arrays, labels = tuple(pairs[::2]), pairs[1::2]
    names: dict[Any, str] = {}
    # Sorted, so that an implicit output is in the order of the labels.
    found = {c for label in (*labels, out or ()) for c in label if c is not Ellipsis}
    for i, c in enumerate(sorted(found)):
        names[c] = parser.get_symbol(i)

    def text(label: Sequence[Any]) -> str:
        return "".join("..." if c is Ellipsis else names[c] for c in label)

    spec = ",".join(map(text, labels))
    return (spec if out is None else f"{spec}->{text(out)}"), arrays


def parse(spec: str, ndims: Sequence[int]) -> tuple[list[str], str]:
    """Return the labels of each operand and of the output."""
    spec = spec.replace(" ", "")
    if not ndims:
        raise ValueError(f"einsum {spec!r} must be given operands, got none. {_ALLOWED}")
    count = spec.split("->")[0].count(",") + 1
    if count != len(ndims):
        raise ValueError(
            f"einsum {spec!r} must be given {count} operands, got {len(ndims)}. {_ALLOWED}"
        )
    if not parser.has_valid_einsum_chars_only(spec):
        raise ValueError(f"the labels of an einsum must be letters, got {spec!r}. {_ALLOWED}")
    try:
        inputs, out, _ = parser.parse_einsum_input((spec, *((1,) * n for n in ndims)), shapes=True)
    except ValueError as e:
        given = " and ".join(map(str, ndims))
        raise ValueError(
            f"einsum {spec!r} must fit operands of {given} axes, got: {e} {_ALLOWED}"
        ) from e
    terms = inputs.split(",")
    for labels, ndim in zip(terms, ndims, strict=True):
        if len(labels) != ndim:
            raise ValueError(
                f"einsum {spec!r} must name the {ndim} axes of an operand, got {len(labels)} "
                f"labels. {_ALLOWED}"
            )
    return terms, out


def check_sizes(spec: str, arrays: Sequence[QArray | jax.Array], terms: Sequence[str]) -> None:
    """Raise a ValueError if sizes of a label differ, 1 aside."""
    first: dict[str, tuple[int, int]] = {}
    for i, (x, term) in enumerate(zip(arrays, terms, strict=True)):
        for c, n in zip(term, x.shape, strict=True):
            where, size = first.setdefault(c, (i, n))
            if size == 1:
                first[c] = i, n
            elif n not in (1, size):
                raise ValueError(
                    f"the sizes of label {c!r} of einsum {spec!r} must be equal, or one of them "
                    f"1, got {size} in operand {where} (shape {arrays[where].shape}) and {n} in "
                    f"operand {i} (shape {x.shape}). Give another label."
                )


def dimension_numbers(in_l: str, in_r: str, out: str) -> DimensionNumbers:
    """Return the contracted and the batch axes of two operands."""
    shared = [c for c in in_l if c in in_r]
    contract = [c for c in shared if c not in out]
    batch = [c for c in shared if c in out]

    def axes(term: str, labels: list[str]) -> tuple[int, ...]:
        return tuple(term.index(c) for c in labels)

    return (
        (axes(in_l, contract), axes(in_r, contract)),
        (axes(in_l, batch), axes(in_r, batch)),
    )


def diagonals(x: QArray | jax.Array, labels: str) -> tuple[QArray | jax.Array, str]:
    """Take the diagonal along axes that have the same label."""
    for c in dict.fromkeys(labels):
        while labels.count(c) > 1:
            x = dequantize(x) if isinstance(x, QArray) else x
            first = labels.index(c)
            second = labels.index(c, first + 1)
            size = max(x.shape[first], x.shape[second])  # one of them may be 1
            shape = [size if a in (first, second) else n for a, n in enumerate(x.shape)]
            x = jnp.diagonal(jnp.broadcast_to(x, shape), axis1=first, axis2=second)
            labels = labels[:first] + labels[first + 1 : second] + labels[second + 1 :] + c
    return x, labels


def squeeze(
    x: QArray | jax.Array, labels: str, differing: set[str]
) -> tuple[QArray | jax.Array, str]:
    """Drop axes of size 1 that the other operand broadcasts."""
    axes = [a for a, c in enumerate(labels) if c in differing and x.shape[a] == 1]
    if axes:
        quantized = isinstance(x, QArray)
        x = moves.view(x, "squeeze", dimensions=axes) if quantized else jnp.squeeze(x, tuple(axes))
    return x, "".join(c for a, c in enumerate(labels) if a not in axes)


def sum_lone(x: QArray | jax.Array, labels: str, elsewhere: str) -> tuple[QArray | jax.Array, str]:
    """Sum over axes whose label is nowhere else."""
    axes = [a for a, c in enumerate(labels) if c not in elsewhere]
    if axes:
        x = jnp.sum(dequantize(x) if isinstance(x, QArray) else x, axis=tuple(axes))
    return x, "".join(c for a, c in enumerate(labels) if a not in axes)


def as_dot(
    lhs: tuple[QArray | jax.Array, str], rhs: tuple[QArray | jax.Array, str], out: str
) -> tuple[QArray | jax.Array, QArray | jax.Array, DimensionNumbers, list[int]]:
    """Return the operands and axes of a dot_general, and a transpose, for an einsum of labels."""
    (left, in_l), (right, in_r) = lhs, rhs
    sizes_l = dict(zip(in_l, left.shape, strict=True))
    sizes_r = dict(zip(in_r, right.shape, strict=True))
    left, in_l = squeeze(left, in_l, {c for c in in_r if sizes_r[c] != sizes_l.get(c)})
    right, in_r = squeeze(right, in_r, {c for c in in_l if sizes_l[c] != sizes_r.get(c)})
    left, in_l = sum_lone(left, in_l, in_r + out)
    right, in_r = sum_lone(right, in_r, in_l + out)
    dims = dimension_numbers(in_l, in_r, out)
    batch = "".join(in_l[a] for a in dims[1][0])
    labels = batch + "".join(c for c in in_l + in_r if c in out and c not in batch)
    return left, right, dims, [labels.index(c) for c in out]


def before_transpose(sharding: Any, order: Sequence[int]) -> Any:
    """Return the sharding of an array whose transpose by `order` has `sharding`."""
    if sharding is None:
        return None
    named = isinstance(sharding, NamedSharding)
    spec = sharding.spec if named else sharding
    parts = tuple(spec) + (None,) * (len(order) - len(spec))
    spec = PartitionSpec(*(parts[order.index(a)] for a in range(len(order))))
    return NamedSharding(sharding.mesh, spec) if named else spec


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
            left, right, dims, order = as_dot((x, labels), (right, in_r), kept)
            x = dot_general(
                left,
                right,
                dims,
                precision=precision,
                preferred_element_type=dtype,
                out_sharding=before_transpose(sharding, order),
            )
            x = x if order == sorted(order) else x.transpose(order)
            labels = kept
        arrays.append(x)
        terms.append(labels)
    (result,) = arrays
    assert not isinstance(result, QArray)
    return result


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
