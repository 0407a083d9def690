"""Contract activations with adapters, one factor after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from opt_einsum import get_symbol

from quant_numerics import Contraction, Convolution, Matmul, RaggedMatmul

Labels = list[str]


def delta_of(a: jax.Array, b: jax.Array, shape: Sequence[int]) -> jax.Array:
    """Return ``sum(a * b, axis=-1)`` of two factors, broadcast to a shape."""
    labels = list(map(get_symbol, range(len(shape) + 1)))
    ours, theirs = (_squeezed(factor, labels[:-1], labels[-1]) for factor in (a, b))
    out = [x for x in labels[:-1] if x in ours[1] or x in theirs[1]]
    y = _einsum([ours, theirs], out)
    sizes = [n if label in out else 1 for label, n in zip(labels, shape, strict=False)]
    return jnp.broadcast_to(y.reshape(sizes), tuple(shape))


def adapter_contraction(
    contraction: Contraction,
    side: int,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    shape: tuple[int, ...],
    extras: tuple[Any, ...],
) -> jax.Array:
    """Contract with ``sum(a * b, axis=-1)``, one factor at a time.

    The factors of the parameter of that shape are at ``side``, each [*(n or 1), rank] as in
    ``LoraWeight``, and are taken in the dtype of ``x``.
    """
    a, b = a.astype(x.dtype), b.astype(x.dtype)
    result = None
    if isinstance(contraction, Matmul) and contraction.out_sharding is None:
        result = _matrix(contraction, side, x, a, b, shape)
    elif isinstance(contraction, Convolution) and side == 1:
        result = _convolution(contraction, x, a, b)
    elif isinstance(contraction, RaggedMatmul) and side == 1 and contraction.trains:
        result = _ragged(contraction, x, a, b, extras)
    if result is not None:
        return result
    # Rare: one factor can't be contracted after the other, so the adapter is multiplied out.
    delta = delta_of(a, b, shape)
    operands = (delta, x) if side == 0 else (x, delta)
    return contraction.run(*operands, *extras)


def _matrix(
    contraction: Matmul,
    side: int,
    x: jax.Array,
    a: jax.Array,
    b: jax.Array,
    shape: tuple[int, ...],
) -> jax.Array:
    ndims = (len(shape), x.ndim) if side == 0 else (x.ndim, len(shape))
    *operands, out = map(list, contraction.labels(*ndims))
    ours, theirs = operands[side], operands[1 - side]
    rank = get_symbol(next(n for n in range(99) if get_symbol(n) not in {*ours, *theirs}))
    factors = [_squeezed(factor, ours, rank) for factor in (a, b)]
    # The result may need an axis that neither factor depends on: it is 1, or was broadcast.
    for label, size in zip(ours, shape, strict=True):
        if label not in {*theirs, *factors[0][1], *factors[1][1]}:
            array, labels = factors[1]
            factors[1] = jnp.broadcast_to(array, (size, *array.shape)), [label, *labels]
    summed = [x for x in set(ours) & set(theirs) if x not in out]

    def contracts(factor: tuple[jax.Array, Labels]) -> int:
        return sum(1 for label in summed if label in factor[1])

    # First the one that the activation is contracted with: the result is as small as the rank.
    first, second = sorted(factors, key=contracts, reverse=True)
    kept = [label for label in theirs if label in out or label in second[1]]
    kept += [label for label in first[1] if label not in kept and
             (label in out or label in second[1])]  # fmt: skip
    small = _einsum([(x, theirs), first], kept, contraction.precision)
    return _einsum(
        [(small, kept), second], out, contraction.precision, contraction.preferred_element_type
    )


def _convolution(
    contraction: Convolution, x: jax.Array, a: jax.Array, b: jax.Array
) -> jax.Array | None:
    """Return the convolution with one factor, then the other per pixel."""
    # The factor without output channels is a kernel with `rank` outputs. The other factor, if it
    # has nothing but output channels, mixes these at each pixel.
    numbers, arguments = contraction.numbers, contraction.arguments
    out, groups, rank = numbers.rhs_spec[0], arguments["feature_group_count"], a.shape[-1]
    if a.shape[out] != 1:
        a, b = b, a
    others = [n for axis, n in enumerate(b.shape[:-1]) if axis != out]
    if a.shape[out] != 1 or any(n != 1 for n in others) or arguments["batch_group_count"] != 1:
        return None
    kernel = jnp.moveaxis(lax.squeeze(a, (out,)), -1, out)
    kernel = jnp.concatenate([kernel] * groups, axis=out) if groups > 1 else kernel
    preferred = arguments.pop("preferred_element_type")
    t = lax.conv_general_dilated(x, kernel, dimension_numbers=numbers, **arguments)
    t = jnp.moveaxis(t, numbers.out_spec[1], -1)
    t = t.reshape(*t.shape[:-1], groups, rank)
    up = b.reshape(groups, -1, rank)
    y = jnp.einsum(
        "...gr,gor->...go", t, up, precision=arguments["precision"],
        preferred_element_type=preferred,
    )  # fmt: skip
    return jnp.moveaxis(y.reshape(*y.shape[:-2], -1), -1, numbers.out_spec[1])


def _ragged(
    contraction: RaggedMatmul, x: jax.Array, a: jax.Array, b: jax.Array, extras: tuple[Any, ...]
) -> jax.Array | None:
    """Return the ragged matmul with factors per group."""
    if a.shape[2] != 1 or b.shape[1] != 1 or a.shape[0] != b.shape[0]:
        return None
    small = contraction.run(x, a[:, :, 0, :], *extras).astype(x.dtype)
    return contraction.run(small, jnp.swapaxes(b[:, 0], 1, 2), *extras)


def _squeezed(factor: jax.Array, labels: Sequence[str], rank: str) -> tuple[jax.Array, Labels]:
    """Return a factor without axes it does not depend on, and its labels."""
    gone = tuple(axis for axis in range(factor.ndim - 1) if factor.shape[axis] == 1)
    kept = [label for axis, label in enumerate(labels) if axis not in gone]
    return lax.squeeze(factor, gone), [*kept, rank]


def _einsum(
    operands: Sequence[tuple[jax.Array, Labels]],
    out: Labels,
    precision: Any = None,
    preferred: Any = None,
) -> jax.Array:
    spec = ",".join("".join(labels) for _, labels in operands) + "->" + "".join(out)
    arrays = [array for array, _ in operands]
    return jnp.einsum(spec, *arrays, precision=precision, preferred_element_type=preferred)
