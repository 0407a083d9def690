"""Packed weights like those of a program, to call their kernels alone."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import quant_numerics as qn

from .packed import PrepackedWeight, scale_sizes
from .packing import Packing, pack


def mapped_columns(held: Any) -> int:
    """Return how many mapped examples are columns of a packed weight; 1 of anything else."""
    if not isinstance(held, PrepackedWeight):
        return 1
    return math.prod(held.n_sizes[part] for part in held.gone)


def over_columns(fn: Callable[..., Any], side: int, weight: PrepackedWeight) -> Callable[..., Any]:
    """Return a function mapped over an operand's mapped columns.

    Args:
        fn: a function of four arguments, the first two of which are operands.
        side: which of them the weight is.
        weight: the weight.
    """
    for i in range(len(weight.gone)):
        places = tuple(0 if j == i else None for j in range(len(weight.gone)))
        axes: list[Any] = [None] * 4
        axes[side] = dataclasses.replace(weight, packed=None, index=None, places=places)
        fn = jax.vmap(fn, tuple(axes))
    return fn


def alike(given: PrepackedWeight, values: Callable[[tuple[int, ...], Any], Any]) -> PrepackedWeight:
    """Return a parameter as a kernel takes it, given what is packed.

    It is a single one even if the given one is an entry of a stack, and has all indices of mapped
    columns.

    Args:
        given: the weight, or its type.
        values: takes a shape and a dtype, and returns the quantized values.
    """
    weight, rank = jax.eval_shape(PrepackedWeight.gathered, given), len(given.k_sizes)
    order = (*weight.order, *(rank + part for part in weight.gone))
    weight = dataclasses.replace(weight, order=order, gone=(), places=())
    lead = len(weight.lead)
    places = {part: lead + axis for axis, part in enumerate(weight.order)}
    k_axes = tuple(places[part] for part in range(rank))
    n_axes = tuple(places[part] for part in range(rank, len(places)))
    scale = list(weight.shape)
    for axis, count in zip(k_axes, scale_sizes(weight.k_sizes, weight.sharing), strict=True):
        scale[axis] = count
    kind = qn.get_qtype(weight.qtype)
    qvalue = values(weight.shape, kind.storage_dtype)
    ones = jnp.ones(scale, weight.scale_dtype)
    whole = jnp.ones((1,) * len(scale), jnp.float32) if kind.two_level else None
    about = {"qtype": weight.qtype, "dtype": weight.dtype}
    q = qn.QArray(qvalue, ones, global_scale=whole, **about)
    sizes = weight.group, weight.bits, weight.platform
    how = {"table": weight.table, "repeats": weight.repeats}
    made = pack(q, Packing(tuple(range(lead)), k_axes, n_axes, *sizes, **how))
    places = tuple(jnp.arange(given.n_sizes[part], dtype=jnp.int32) for part in given.gone)
    return dataclasses.replace(
        weight, packed=made.packed, order=given.order, gone=given.gone, places=places
    )
