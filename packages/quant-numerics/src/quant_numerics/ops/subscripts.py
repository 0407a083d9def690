"""Reading the subscripts of an einsum, and making operands fit them."""

from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from opt_einsum import parser

from quant_numerics.array import moves
from quant_numerics.array.operand import dequantize
from quant_numerics.array.qarray import QArray

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
    """Return an einsum of two operands as a dot_general and a transpose.

    Args:
      lhs: an operand and its labels, each of which it has once.
      rhs: the same.
      out: the labels of the output.

    Returns:
      The operands of the dot_general, its dimension numbers, and the order of the transpose.
    """
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
