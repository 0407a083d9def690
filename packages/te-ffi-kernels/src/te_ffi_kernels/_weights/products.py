"""Products of activations with packed weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from .. import _op
from . import reference
from .form import Form
from .packed import PackedWeight
from .sharding import partition_product


def gemm_w8a8(
    x: jax.Array,
    weight: PackedWeight,
    *,
    out_dtype: DTypeLike | None = None,
    index: ArrayLike | None = None,
    group_sizes: jax.Array | None = None,
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
        index: int32[], which weight of a stack [weights, k, n] to multiply with. A kernel reads it
            where it lies in the stack; what ``lax.dynamic_index_in_dim`` cuts out is copied. Beyond
            the ends it is the end.
        group_sizes: int32[weights], for a stack [weights, k, n]: how many rows of x [m, k] each of
            its weights is multiplied with, in order, as in ``lax.ragged_dot``. Rows beyond the last
            group give zeros. On CPU a weight without rows is not read.

    Returns:
        [*rows, n]. A row of x with an infinity or NaN gives a row without finite numbers, but for
        columns that are all zero. The gradient with respect to x is that of the product of floats.

    Raises:
        TypeError: another dtype, or a weight that isn't a PackedWeight.
        ValueError: another number of columns, or a weight of 4 bits, or a stack with neither index
            nor group_sizes, or with both.
        jax.errors.JaxRuntimeError: when it runs on CPU: a weight whose buffer is damaged, or a
            negative size of a group. On a GPU the columns of a panel with a damaged header are NaN.
    """
    return _product("gemm_w8a8", 8, x, weight, out_dtype, index, group_sizes)


def gemm_w8a16(
    x: jax.Array,
    weight: PackedWeight,
    *,
    out_dtype: DTypeLike | None = None,
    index: ArrayLike | None = None,
    group_sizes: jax.Array | None = None,
) -> jax.Array:
    """Matrix product of float activations with a weight in 8 bits.

    Activations are taken in fixed point, with 15 bits of the row's largest magnitude where they are
    bfloat16 or float16 and 23 bits where they are float32, so that integer units sum the products
    exactly. Arguments as for ``gemm_w8a8``; a row with an infinity or NaN gives NaN.
    """
    return _product("gemm_w8a16", 8, x, weight, out_dtype, index, group_sizes)


def gemv_w8(
    x: jax.Array,
    weight: PackedWeight,
    *,
    out_dtype: DTypeLike | None = None,
    index: ArrayLike | None = None,
    group_sizes: jax.Array | None = None,
) -> jax.Array:
    """``gemm_w8a16`` for one row or a few: it takes as long as reading the weight."""
    return _product("gemv_w8", 8, x, weight, out_dtype, index, group_sizes)


def gemv_w4(
    x: jax.Array,
    weight: PackedWeight,
    *,
    out_dtype: DTypeLike | None = None,
    index: ArrayLike | None = None,
    group_sizes: jax.Array | None = None,
) -> jax.Array:
    """``gemm_w8a16`` with a weight in 4 bits, packed by ``pack_w4``; for any number of rows."""
    return _product("gemv_w4", 4, x, weight, out_dtype, index, group_sizes)


def _product(
    op: str,
    bits: int,
    x: jax.Array,
    weight: PackedWeight,
    out_dtype: DTypeLike | None,
    index: ArrayLike | None,
    group_sizes: jax.Array | None,
) -> jax.Array:
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    _check(op, bits, x, weight, dtype, index, group_sizes)
    if index is not None:
        picks, given = "stack", (jnp.asarray(index, jnp.int32),)
    elif group_sizes is not None:
        picks, given = "groups", (group_sizes.astype(jnp.int32),)
    else:
        picks, given = "", ()
    return _run(Form(op, weight.layout, weight.n, dtype, picks), x, weight.buffer, *given)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _differentiable(form: Form, x: jax.Array, buffer: jax.Array, *index: jax.Array) -> jax.Array:
    return _batched(form)(x, buffer, *index)


def _forward(form: Form, x: jax.Array, *weight: jax.Array) -> tuple[jax.Array, Any]:
    return _batched(form)(x, *weight), (jnp.zeros((), x.dtype), *weight)


def _backward(form: Form, saved: tuple[jax.Array, ...], ct: jax.Array) -> tuple[Any, ...]:
    like, *weight = saved
    ct = ct.astype(jnp.float32)
    grouped = form.picks == "groups"
    codes, scale = form.weight(*weight[: 1 if grouped else 2]).unpack()
    floats = codes.astype(jnp.float32) * jnp.repeat(scale, form.layout.k // scale.shape[-2], -2)
    if grouped:
        grad = lax.ragged_dot(ct, floats.swapaxes(1, 2), weight[1])
    else:
        grad = jnp.einsum("...n,kn->...k", ct, floats)
    nothing = (np.zeros(operand.shape, jax.dtypes.float0) for operand in weight)
    return grad.astype(like.dtype), *nothing


_differentiable.defvjp(_forward, _backward)

# Jitted so that a model with many equal layers traces it once.
_run = jax.jit(_differentiable, static_argnums=0)


def _batched(form: Form) -> Callable[..., jax.Array]:
    """Return the product for one weight, with the rule that rows of a batch are rows."""

    def rule(axis_size: int, in_batched: Sequence[bool], *operands: jax.Array) -> Any:
        return NotImplemented if any(in_batched[1:]) else (wrapped(*operands), True)

    wrapped = _op.batched(functools.partial(_kernel, form), rule)
    return wrapped


def _kernel(form: Form, x: jax.Array, *weight: jax.Array) -> jax.Array:
    op, layout = form.op, form.layout
    rows = x.reshape(math.prod(x.shape[:-1]), layout.k)
    asked = rows, jax.ShapeDtypeStruct((layout.k, form.n), jnp.int8)
    one = dataclasses.replace(form, picks="")

    def in_jax(rows: jax.Array, *weight: jax.Array) -> jax.Array:
        if form.picks == "groups":
            return _group_by_group(one, rows, *weight)
        if form.picks == "stack":  # cut out, and multiplied by whatever multiplies one weight here
            return _kernel(one, rows, form.weight(*weight).buffer)
        return getattr(reference, op)(rows, form.weight(*weight), out_dtype=form.dtype)

    y = _op.call(
        f"{op}_{form.picks}" if form.picks else op,
        in_jax,
        (rows, *weight),
        jax.ShapeDtypeStruct((rows.shape[0], form.n), form.dtype),
        asked=asked,
        question=layout.question,
        partition=functools.partial(partition_product, form),
        k=layout.k,
        n=form.n,
        **layout.attributes,
    )
    return y.reshape(*x.shape[:-1], form.n)


def _group_by_group(
    one: Form, rows: jax.Array, stack: jax.Array, group_sizes: jax.Array
) -> jax.Array:
    """Multiply all rows with each weight of a stack, and keep those of its group."""
    ends = jnp.cumsum(group_sizes)
    at = lax.broadcasted_iota(jnp.int32, (rows.shape[0], 1), 0)

    def step(y: jax.Array, group: Any) -> tuple[jax.Array, None]:
        buffer, begin, end = group
        return jnp.where((begin <= at) & (at < end), _kernel(one, rows, buffer), y), None

    nothing = jnp.zeros((rows.shape[0], one.n), one.dtype)
    return lax.scan(step, nothing, (stack, ends - group_sizes, ends))[0]


def _check(
    op: str,
    bits: int,
    x: jax.Array,
    weight: PackedWeight,
    dtype: Any,
    index: ArrayLike | None,
    group_sizes: jax.Array | None,
) -> None:
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
    try:
        weight.check()
    except ValueError as error:
        raise ValueError(f"{op}: weight: {error}") from None
    _check_stack(op, x, weight.shape[:-2], index, group_sizes)
    for name, given in (("x", x.dtype), ("out_dtype", dtype)):
        if given not in (jnp.float32, jnp.bfloat16, jnp.float16):
            raise TypeError(f"{op}: {name} is {given}, and must be float32, bfloat16 or float16")
    if x.ndim == 0 or x.shape[-1] != weight.k:
        raise ValueError(
            f"{op}: x has shape {x.shape}, and its last axis must have the {weight.k} rows of the "
            "weight"
        )


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
    if index is not None and group_sizes is not None:
        raise ValueError(f"{op}: give an index or group_sizes, not both")
    if len(lead) != 1 or lead[0] == 0:
        raise ValueError(
            f"{op}: weight must be a stack along one axis where there is an index or group_sizes, "
            f"got a stack of shape {lead}"
        )
    if index is not None:
        if jnp.shape(index) != () or not jnp.issubdtype(jnp.result_type(index), jnp.integer):
            raise TypeError(f"{op}: index must be a scalar integer, got {jnp.asarray(index).aval}")
        return
    sizes = jnp.asarray(group_sizes)
    if sizes.shape != lead or not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise ValueError(
            f"{op}: group_sizes must be integers of shape {lead}, one for each weight of the "
            f"stack, got {jax.typeof(sizes)}"
        )
    if x.ndim != 2:
        raise ValueError(f"{op}: x must be [rows, k] where there are group_sizes, got {x.shape}")
