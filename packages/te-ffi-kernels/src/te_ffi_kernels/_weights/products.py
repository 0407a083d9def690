"""Products of activations with packed weights."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from .. import _op
from . import reference
from .packed import PackedWeight
from .sharding import partition_product


def gemm_w8a8(
    x: jax.Array, weight: PackedWeight, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """Matrix product of activations that are quantized to int8 on the way, row by row.

    Products of codes are summed in int32, exactly, and rescaled in float32: times the scale of the
    row, then times that of the column (section 2.2 of Jacob et al. 2018, arXiv:1712.05877; dynamic
    scales per row as in ZeroQuant, arXiv:2206.01861). With groups, the sums of each are rescaled
    and then added up.

    Args:
        x: [*rows, k], float32, bfloat16 or float16.
        weight: of k rows and n columns, packed by ``pack_w8``.
        out_dtype: float32, bfloat16 or float16; by default that of x.

    Returns:
        [*rows, n]. A row of x with an infinity or NaN gives a row without finite numbers, but for
        columns that are all zero. The gradient with respect to x is that of the product of floats.

    Raises:
        TypeError: another dtype, or a weight that isn't a PackedWeight.
        ValueError: another number of columns, or a weight of 4 bits or a stack of several.
        jax.errors.JaxRuntimeError: when it runs on CPU: a weight whose buffer is damaged. On a GPU
            the columns of a panel with a damaged header are NaN.
    """
    return _product("gemm_w8a8", 8, x, weight, out_dtype)


def gemm_w8a16(
    x: jax.Array, weight: PackedWeight, *, out_dtype: DTypeLike | None = None
) -> jax.Array:
    """Matrix product of float activations with a weight in 8 bits.

    Activations are taken in fixed point, with 15 bits of the row's largest magnitude where they are
    bfloat16 or float16 and 23 bits where they are float32, so that integer units sum the products
    exactly. Arguments as for ``gemm_w8a8``; a row with an infinity or NaN gives NaN.
    """
    return _product("gemm_w8a16", 8, x, weight, out_dtype)


def gemv_w8(x: jax.Array, weight: PackedWeight, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """``gemm_w8a16`` for one row or a few: it takes as long as reading the weight."""
    return _product("gemv_w8", 8, x, weight, out_dtype)


def gemv_w4(x: jax.Array, weight: PackedWeight, *, out_dtype: DTypeLike | None = None) -> jax.Array:
    """``gemm_w8a16`` with a weight in 4 bits, packed by ``pack_w4``; for any number of rows."""
    return _product("gemv_w4", 4, x, weight, out_dtype)


def _product(
    op: str, bits: int, x: jax.Array, weight: PackedWeight, out_dtype: DTypeLike | None
) -> jax.Array:
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    _check(op, bits, x, weight, dtype)
    shape = (weight.k, weight.n, weight.group)
    return _run(op, bits, shape, dtype, x, weight.buffer)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2, 3))
def _differentiable(
    op: str, bits: int, shape: tuple[int, int, int], dtype: Any, x: jax.Array, buffer: jax.Array
) -> jax.Array:
    return _batched(op, bits, shape, dtype)(x, buffer)


def _forward(
    op: str, bits: int, shape: tuple[int, int, int], dtype: Any, x: jax.Array, buffer: jax.Array
) -> tuple[jax.Array, Any]:
    return _batched(op, bits, shape, dtype)(x, buffer), (jnp.zeros((), x.dtype), buffer)


def _backward(
    op: str,
    bits: int,
    shape: tuple[int, int, int],
    dtype: Any,
    saved: tuple[jax.Array, jax.Array],
    ct: jax.Array,
) -> tuple[jax.Array, Any]:
    like, buffer = saved
    k, n, group = shape
    codes, scale = PackedWeight(buffer, k, n, bits, group).unpack()
    weight = codes.astype(jnp.float32) * jnp.repeat(scale, k // scale.shape[0], axis=0)
    grad = jnp.einsum("...n,kn->...k", ct.astype(jnp.float32), weight)
    return grad.astype(like.dtype), np.zeros(buffer.shape, jax.dtypes.float0)


_differentiable.defvjp(_forward, _backward)

# Jitted so that a model with many equal layers traces it once.
_run = jax.jit(_differentiable, static_argnums=(0, 1, 2, 3))


def _batched(
    op: str, bits: int, shape: tuple[int, int, int], dtype: Any
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """The product for one weight, with the rule that rows of a batch are rows."""

    def product(x: jax.Array, buffer: jax.Array) -> jax.Array:
        return _kernel(op, bits, shape, dtype, x, buffer)

    def rule(axis_size: int, in_batched: Sequence[bool], x: jax.Array, buffer: jax.Array) -> Any:
        return NotImplemented if in_batched[1] else (wrapped(x, buffer), True)

    wrapped = _op.batched(product, rule)
    return wrapped


def _kernel(
    op: str, bits: int, shape: tuple[int, int, int], dtype: Any, x: jax.Array, buffer: jax.Array
) -> jax.Array:
    k, n, group = shape
    rows = x.reshape(math.prod(x.shape[:-1]), k)

    def in_jax(rows: jax.Array, buffer: jax.Array) -> jax.Array:
        weight = PackedWeight(buffer, k, n, bits, group)
        return getattr(reference, op)(rows, weight, out_dtype=dtype)

    results = jax.ShapeDtypeStruct((rows.shape[0], n), dtype)
    weight = jax.ShapeDtypeStruct((k, n), jnp.int8)
    y = _op.call(
        op,
        in_jax,
        (rows, buffer),
        results,
        asked=(rows, weight),
        # As provider-xla asks, so that a plan shows what will run.
        question={"group": group, "bits": bits},
        partition=functools.partial(partition_product, shape, dtype),
        k=k,
        n=n,
        group=group,
    )
    return y.reshape(*x.shape[:-1], n)


def _check(op: str, bits: int, x: jax.Array, weight: PackedWeight, dtype: Any) -> None:
    if not isinstance(weight, PackedWeight):
        raise TypeError(
            f"{op}: weight is a {type(weight).__name__}, and must be a PackedWeight: pack it once "
            f"with pack_w{bits}(codes, scale)"
        )
    if weight.bits != bits:
        raise ValueError(
            f"{op}: weight is packed in {weight.bits} bits, and must be in {bits}: pack it with "
            f"pack_w{bits}"
        )
    if len(weight.buffer.shape) != 2:
        raise ValueError(
            f"{op}: weight is a stack of shape {weight.shape}; use one of its weights, or vmap or "
            "scan over it"
        )
    try:
        weight.check()
    except ValueError as error:
        raise ValueError(f"{op}: weight: {error}") from None
    for name, given in (("x", x.dtype), ("out_dtype", dtype)):
        if given not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise TypeError(f"{op}: {name} is {given}, and must be float32, bfloat16 or float16")
    if x.ndim == 0 or x.shape[-1] != weight.k:
        raise ValueError(
            f"{op}: x has shape {x.shape}, and its last axis must have the {weight.k} rows of the "
            "weight"
        )
