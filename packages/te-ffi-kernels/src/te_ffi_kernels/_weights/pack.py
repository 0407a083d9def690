"""Packing of weights, done once: its result is a parameter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from .. import _op
from . import reference
from .layout import COLUMNS, GROUP_ALIGNMENT, group_count, panel_bytes
from .packed import PackedWeight


def pack_w8(codes: jax.Array, scale: jax.Array) -> PackedWeight:
    """Packs a weight in 8 bits, for ``gemm_w8a8``, ``gemm_w8a16`` and ``gemv_w8``.

    Args:
        codes: int8[*lead, k, n], what a product sums over first.
        scale: float32[*lead, groups, n]: the weight is ``codes * scale``, with one scale per column
            (groups 1), or one for each k / groups rows of it, a multiple of 8.

    Returns:
        The packed weight.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that don't fit together, no rows, or groups of another size.
    """
    return _pack("pack_w8", codes, scale, 8)


def pack_w4(codes: jax.Array, scale: jax.Array) -> PackedWeight:
    """Packs a weight in 4 bits, for ``gemv_w4``.

    As ``pack_w8``; codes are int4, or int8 between -8 and 7 (those beyond are an error of the
    kernel on CPU, and wrap around elsewhere).
    """
    return _pack("pack_w4", codes, scale, 4)


def _pack(op: str, codes: jax.Array, scale: jax.Array, bits: int) -> PackedWeight:
    group = _check(op, codes, scale, bits)
    buffer = _packed(codes, scale, op=op, bits=bits, group=group)
    k, n = codes.shape[-2:]
    return PackedWeight(buffer, k, n, bits, group)


@functools.partial(jax.jit, static_argnames=("op", "bits", "group"))
def _packed(codes: jax.Array, scale: jax.Array, *, op: str, bits: int, group: int) -> jax.Array:
    def kernel(codes: jax.Array, scale: jax.Array) -> jax.Array:
        k, n = codes.shape
        results = jax.ShapeDtypeStruct((-(-n // COLUMNS), panel_bytes(k, bits, group)), jnp.uint8)

        def in_jax(codes: jax.Array, scale: jax.Array) -> jax.Array:
            return getattr(reference, op)(codes, scale).buffer

        return _op.call(op, in_jax, (codes, scale), results, group=group)

    one = _op.batched(kernel)
    for _ in codes.shape[:-2]:
        one = jax.vmap(one)
    return one(codes.astype(jnp.int8), scale)


def _check(op: str, codes: jax.Array, scale: jax.Array, bits: int) -> int:
    """Returns the group size, 0 for one scale per column."""
    allowed = ("int8", "int4") if bits == 4 else ("int8",)
    if codes.dtype.name not in allowed:
        raise TypeError(f"{op}: codes is {codes.dtype.name}, and must be {' or '.join(allowed)}")
    if scale.dtype != jnp.float32:
        raise TypeError(f"{op}: scale is {scale.dtype.name}, and must be float32")
    if codes.ndim < 2 or scale.ndim != codes.ndim:
        raise ValueError(
            f"{op}: codes has shape {codes.shape} and scale {scale.shape}; they must be "
            "[*lead, k, n] and [*lead, groups, n]"
        )
    *lead, k, n = codes.shape
    groups = scale.shape[-2]
    if k == 0:
        raise ValueError(f"{op}: codes has shape {codes.shape}: there is no row to pack")
    if scale.shape != (*lead, groups, n) or groups == 0 or k % groups:
        raise ValueError(
            f"{op}: scale has shape {scale.shape}, and must be [*{lead}, groups, {n}], with a "
            f"number of groups that divides the {k} rows of codes"
        )
    if groups == 1:
        return 0
    group = k // groups
    if group % GROUP_ALIGNMENT:
        raise ValueError(
            f"{op}: scale has {groups} groups of {group} rows; the rows of a group must be a "
            f"multiple of {GROUP_ALIGNMENT}. Quantize with another tile size"
        )
    assert group_count(k, group) == groups
    return group
