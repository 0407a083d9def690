"""Matmuls of activations with packed weights."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from ..op import Op
from . import reference
from .config import (
    Form,
    check,
    check_added,
    check_clamp,
    check_rotation,
    check_scale,
    clamped,
    is_inside,
)
from .sharding import partition_matmul
from .weight import PackedWeight

_QUANTIZES = ("gemm_w8a8", "gemm_w4a8")


def gemm_w8a8(
    x: jax.Array,
    weight: PackedWeight,
    *,
    out_dtype: DTypeLike | None = None,
    index: ArrayLike | None = None,
    group_sizes: jax.Array | None = None,
    signs: jax.Array | None = None,
    rotation: int = 0,
    x_scale: ArrayLike | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    clamp: tuple[float, float] | None = None,
) -> jax.Array:
    """Multiply activations, quantized to int8 by row, with int8 weights.

    Products of quantized values are summed in int32, exactly, and rescaled in float32: times the
    scale of the row, then times that of the column (section 2.2 of Jacob et al. 2018,
    arXiv:1712.05877; dynamic scales per row as in ZeroQuant, arXiv:2206.01861). With groups, the
    sums of each are rescaled and then added up. On a CPU with AMX, 64 or more rows of bfloat16 are
    multiplied in bfloat16 instead if the weight has groups: quantized rows and weights are rounded
    to bfloat16, and sums are float32. So are more than 16 rows of any dtype on a GPU, those of
    float16 in float16.

    Args:
        x: [*rows, k], float32, bfloat16 or float16.
        weight: of k rows and n columns, packed by ``pack_w8``.
        out_dtype: float32, bfloat16 or float16; by default that of x.
        index: int32[], which weight of a stack [weights, k, n] to multiply with. A kernel reads it
            where it lies in the stack, whereas ``lax.dynamic_index_in_dim`` copies what it cuts
            out. A negative one counts from the end; beyond the ends it is the end.
        group_sizes: int32[weights], for a stack [weights, k, n]: how many rows of x [m, k] each of
            its weights is multiplied with, in order, as in ``lax.ragged_dot``. Rows beyond the last
            group give zeros. On CPU a weight without rows is not read. With an index int32[groups]
            the sizes are int32[groups], and the index says which weight of the stack each group
            has.
        signs: int8[k], 1 or -1: rows are multiplied with them before they are rotated.
        rotation: size of the blocks of a row that are multiplied with Sylvester's orthonormal
            Hadamard matrix before the row is quantized: a power of two that divides k, or 0 for
            none. ``weight`` must be rotated in the same way; the matmul is then that of plain rows
            and a plain weight (QuaRot, arXiv:2404.00456). It needs ``signs``, and does not go with
            ``group_sizes``.
        x_scale: float32[], the scale of all rows, such as one that was measured before; by default
            each row has its own. What is beyond 127 times the scale saturates, and so does an
            infinity; a NaN becomes 0.
        bias: [n], of the result's dtype: added to each row of the product. A kernel adds it before
            it stores the row; the numbers are those of an addition after the matmul.
        residual: [*rows, n], of the result's dtype: added after the bias in the same way.
        clamp: two numbers between which results are cut in the end: (0, inf) for ``relu``. None of
            the three goes with ``group_sizes``.

    Returns:
        [*rows, n]. Without ``x_scale`` a row of x with an infinity or NaN gives a row without
        finite numbers, but for columns that are all zero. The gradient with respect to x is that
        of the matmul of floats.

    Raises:
        TypeError: another dtype, or a weight that isn't a PackedWeight.
        ValueError: another number of columns, or a weight of 4 bits, or a stack with neither index
            nor group_sizes, or a bias or residual of another shape.
        jax.errors.JaxRuntimeError: when it runs on CPU: a weight whose buffer is damaged, or a
            negative size of a group. On a GPU the columns of a panel with a damaged header are NaN,
            and so is everything if a size is negative.
    """
    return _matmul("gemm_w8a8", 8, **locals())


def gemm_w8a16(
    x: jax.Array,
    weight: PackedWeight,
    *,
    out_dtype: DTypeLike | None = None,
    index: ArrayLike | None = None,
    group_sizes: jax.Array | None = None,
    signs: jax.Array | None = None,
    rotation: int = 0,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    clamp: tuple[float, float] | None = None,
) -> jax.Array:
    """Multiply float activations with a weight in 8 bits.

    Activations are rounded to fixed point, so that integer units sum the products exactly. Up to
    four rows have 23 bits of the row's largest magnitude. More rows have 15 bits of the largest
    magnitude in each group of the weight (in each 256 numbers without groups), which is a relative
    error of about 2e-5. On a CPU with AMX, 64 or more rows of bfloat16 (256 or more for a weight
    without groups) are multiplied in bfloat16: x as it is, a weight with groups rounded to
    bfloat16, sums in float32. On a GPU x is always taken as it is, and more than 16 rows of 16 bits
    have a weight with groups rounded to their dtype.

    The arguments are those of ``gemm_w8a8``. A row with an infinity or NaN gives NaN; in bfloat16
    on AMX, and in 16 bits on GPUs, an infinity may give infinities.
    """
    return _matmul("gemm_w8a16", 8, **locals())


def gemm_w4a16(
    x: jax.Array,
    weight: PackedWeight,
    *,
    out_dtype: DTypeLike | None = None,
    index: ArrayLike | None = None,
    group_sizes: jax.Array | None = None,
    signs: jax.Array | None = None,
    rotation: int = 0,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    clamp: tuple[float, float] | None = None,
) -> jax.Array:
    """Multiply float activations with a weight of ``pack_w4``.

    The arguments are those of ``gemm_w8a16``, and so is the arithmetic, but that a CPU with AMX
    multiplies in bfloat16 from 16 rows of bfloat16 on, and so does one with AVX512-BF16 beside
    groups of up to 64 rows and the table "nf4"; and that any number of rows has 15 bits beside that
    table and scales in float8_e4m3fn. Kernels for GPUs have no tables.
    """
    return _matmul("gemm_w4a16", 4, **locals())


def gemm_w4a8(
    x: jax.Array,
    weight: PackedWeight,
    *,
    out_dtype: DTypeLike | None = None,
    index: ArrayLike | None = None,
    group_sizes: jax.Array | None = None,
    signs: jax.Array | None = None,
    rotation: int = 0,
    x_scale: ArrayLike | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    clamp: tuple[float, float] | None = None,
) -> jax.Array:
    """Multiply as ``gemm_w8a8`` with a weight packed by ``pack_w4``.

    In groups of 32 its relative error is about 5e-3, as that of llama.cpp's Q4_0. With many rows it
    is up to twice as fast as ``gemm_w4a16``. The arguments are those of ``gemm_w8a8``.
    """
    return _matmul("gemm_w4a8", 4, **locals())


def _matmul(
    op: str,
    bits: int,
    *,
    x: jax.Array,
    weight: PackedWeight,
    out_dtype: DTypeLike | None,
    index: ArrayLike | None,
    group_sizes: jax.Array | None,
    signs: jax.Array | None,
    rotation: int,
    bias: jax.Array | None,
    residual: jax.Array | None,
    clamp: tuple[float, float] | None,
    x_scale: ArrayLike | None = None,
) -> jax.Array:
    """Check the arguments of a matmul, which are those of ``gemm_w8a8``, and compute it."""
    dtype = jnp.dtype(x.dtype if out_dtype is None else out_dtype)
    check(op, bits, x, weight, dtype, index, group_sizes)
    check_rotation(op, weight.k, signs, rotation, group_sizes)
    result = jax.ShapeDtypeStruct((*x.shape[:-1], weight.n), dtype)
    clamp = check_clamp(op, clamp)
    check_added(op, result, bias, residual, clamp, group_sizes)
    check_scale(op, op in _QUANTIZES, x_scale)
    picks, given = "", ()
    if group_sizes is not None:
        places = jnp.arange(weight.shape[0]) if index is None else jnp.asarray(index)
        picks, given = "groups", (places.astype(jnp.int32), group_sizes.astype(jnp.int32))
    elif index is not None:
        picks, given = "stack", (jnp.asarray(index, jnp.int32),)
    scale = None if x_scale is None else jnp.asarray(x_scale, jnp.float32)
    more = (signs, scale, bias, residual)
    given = (*given, *(array for array in more if array is not None))
    has_scale, has_bias, has_residual = (array is not None for array in more[1:])
    has = {"has_scale": has_scale, "has_bias": has_bias, "has_residual": has_residual}
    form = Form(op, weight.layout, weight.n, dtype, picks, int(rotation), clamp=clamp, **has)
    return _run(form, x, weight.buffer, *given)


@functools.partial(jax.jit, static_argnums=0)
def _run(form: Form, x: jax.Array, *given: jax.Array) -> jax.Array:
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if form.has_residual:
        given = (*given[:-1], given[-1].reshape(rows.shape[0], form.n))
    return _MATMUL(form, rows, *given).reshape(*x.shape[:-1], form.n)


def _reference(form: Form, rows: jax.Array, *operands: jax.Array) -> jax.Array:
    if form.has_more:  # after what multiplies here
        given, added = form.parted(operands)
        y = _MATMUL(form.plain, rows, *given)
        for array in added:
            y = y + jnp.atleast_2d(array)  # reshape(-1, n) fails where there are no columns
        return clamped(y, form.clamp)
    weight, signs, scale = form.of_weight(operands)
    more = () if scale is None else (scale,)
    if form.rotation:
        rotated = reference.rotate(rows, signs, form.rotation)
        return _MATMUL(dataclasses.replace(form, rotation=0), rotated, *weight, *more)
    one = dataclasses.replace(form, picks="")
    if form.picks == "groups":
        return _group_by_group(one, rows, more, *weight)
    if form.picks == "stack":  # cut out, and multiplied by whatever multiplies one weight here
        return _MATMUL(one, rows, form.weight(*weight).buffer, *more)
    if form.op in _QUANTIZES:
        return reference.quantized(rows, form.weight(*weight), form.dtype, scale)
    return reference.weight_only(rows, form.weight(*weight), form.dtype)


def _group_by_group(
    one: Form,
    rows: jax.Array,
    scale: tuple[jax.Array, ...],
    stack: jax.Array,
    index: jax.Array,
    group_sizes: jax.Array,
) -> jax.Array:
    """Multiply all rows with each group's weight, and keep the group's rows."""
    ends = jnp.cumsum(group_sizes)
    at = lax.broadcasted_iota(jnp.int32, (rows.shape[0], 1), 0)

    def step(y: jax.Array, group: Any) -> tuple[jax.Array, None]:
        i, begin, end = group
        found = _MATMUL(one, rows, one.weight(stack, i).buffer, *scale)
        return jnp.where((begin <= at) & (at < end), found, y), None

    nothing = jnp.zeros((rows.shape[0], one.n), one.dtype)
    return lax.scan(step, nothing, (index, ends - group_sizes, ends))[0]


def _results(form: Form, rows: jax.Array, *weight: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((rows.shape[0], form.n), form.dtype)


def _asked(form: Form, rows: jax.Array, *weight: jax.Array) -> Any:
    """Ask as provider-xla does, so that a plan shows what will run.

    It says `to_pack` besides, and `convolves`: here the weight is packed already.
    """
    layout = form.layout
    question = layout.question | form.told
    return (rows, jax.ShapeDtypeStruct((layout.k, form.n), jnp.int8)), question


def _attributes(form: Form, *_: jax.Array) -> dict[str, Any]:
    return {"k": form.layout.k, "n": form.n, **form.layout.attributes, **form.told}


def _batch(
    run: Any, form: Form, size: int, in_batched: Any, x: jax.Array, *operands: jax.Array
) -> Any:
    """Merge the mapped axis into the rows."""
    weight, added = form.parted(operands)
    is_rows, *mapped = in_batched
    of_weight, of_added = form.parted(mapped)
    if any(of_weight) or form.picks == "groups":
        return NotImplemented
    # As [size or 1, rows or 1, n].
    added = [x if mapped else x[None] for x, mapped in zip(added, of_added, strict=True)]
    if form.has_bias:
        added[0] = added[0][:, None]
    if not is_rows:  # only what is added differs: multiply once
        y = functools.reduce(jnp.add, added, run(form.plain, x, *weight)[None])
        return clamped(y, form.clamp), True
    # A bias that is mapped is a residual of all rows. A kernel adds one of these.
    count = form.has_bias and not of_added[0]
    whole = (size, x.shape[1], form.n)
    bias = [x.reshape(form.n) for x in added[:count]]
    residuals = [
        jnp.broadcast_to(x, whole).reshape(math.prod(whole[:2]), form.n) for x in added[count:]
    ]
    inside, after = residuals[:1], residuals[1:]
    joined = dataclasses.replace(
        form, has_bias=count, has_residual=len(inside) > 0, clamp=None if after else form.clamp
    )
    rows = x.reshape(size * x.shape[1], x.shape[2])
    y = functools.reduce(jnp.add, after, run(joined, rows, *weight, *bias, *inside))
    return clamped(y, form.clamp if after else None).reshape(whole), True


def _save(form: Form, operands: tuple[jax.Array, ...], y: jax.Array) -> Any:
    x, *given = operands
    # Of x, the gradient needs the dtype alone, and nothing of what is added; of the result, where
    # it was not cut.
    return jnp.zeros((), x.dtype), is_inside(y, form.clamp), *form.parted(given)[0]


def _gradient(form: Form, saved: tuple[Any, ...], ct: jax.Array) -> tuple[Any, ...]:
    like, inside, *given = saved
    if inside is not None:
        ct = jnp.where(inside, ct, jnp.zeros((), ct.dtype))
    weight, signs, _ = form.of_weight(given)
    added = (ct.astype(jnp.float32).sum(0).astype(ct.dtype),) if form.has_bias else ()
    added += (ct,) if form.has_residual else ()
    ct = ct.astype(jnp.float32)
    grouped = form.picks == "groups"
    if grouped:  # the weight of each group, all dequantized at once
        weight_of = jax.vmap(lambda i: form.weight(weight[0], i).buffer)
        qvalue, scale = form.weight(weight_of(weight[1])).integers()
    else:
        qvalue, scale = form.weight(*weight).integers()
    turned = reference.dequantized(qvalue, scale, form.layout.k).swapaxes(-2, -1)
    # Without it, GPUs multiply float32 in TF32, whose 11 bits are fewer than the kernels keep.
    exact = lax.Precision.HIGHEST
    if grouped:
        grad = lax.ragged_dot(ct, turned, weight[2], precision=exact)
    else:
        grad = jnp.matmul(ct, turned, precision=exact)
    if form.rotation:
        grad = reference.rotate_back(grad, signs, form.rotation)
    return grad.astype(like.dtype), *(None for _ in given), *added


_MATMUL = Op(
    lambda form: form.op,
    _reference,
    results=_results,
    attributes=_attributes,
    asked=_asked,
    partition=partition_matmul,
    batch=_batch,
    save=_save,
    gradient=_gradient,
)
