"""Packing of weights, done once: its result is a parameter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ..op import Op
from .layout import GROUP_ALIGNMENT, Layout
from .weight import PackedWeight


def pack_w8(qvalue: jax.Array, scale: jax.Array, *, platform: str | None = None) -> PackedWeight:
    """Pack a weight in 8 bits, for ``gemm_w8a8``, ``gemm_w8a16`` and ``gemv_w8``.

    Args:
        qvalue: quantized values, int8[*lead, k, n]; a matmul sums over k.
        scale: float32[*lead, groups, n]: the weight is ``qvalue * scale``, with one scale per
            column (groups 1), or one for each k / groups rows of it, a multiple of 8.
        platform: the platform that will read it, as kernels spell it: ``"cpu"``, ``"cuda"``. It
            has no effect: all platforms with kernels read the same form.

    Returns:
        The packed weight.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that don't fit together, no rows, or groups of another size.
    """
    return _pack("pack_w8", qvalue, scale, 8)


def pack_w4(qvalue: jax.Array, scale: jax.Array, *, platform: str | None = None) -> PackedWeight:
    """Pack a weight in 4 bits, for ``gemv_w4`` and ``gemm_w4a8``.

    Args:
        qvalue: int4[*lead, k, n], or int8 between -8 and 7 (values beyond are an error of the
            kernel on CPU, and wrap around elsewhere).
        scale: float32 or float16 [*lead, groups, n], as for ``pack_w8``. Scales are stored as they
            are: in groups of 32, float16 takes 4.5 bits a weight, and float32 takes 5. Round scales
            to float16 before the quantized values are chosen, not after, and only if all of them
            fit.
        platform: as for ``pack_w8``.

    Returns:
        The packed weight.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that ``pack_w8`` would refuse.
    """
    return _pack("pack_w4", qvalue, scale, 4)


def _pack(op: str, qvalue: jax.Array, scale: jax.Array, bits: int) -> PackedWeight:
    layout = layout_of(op, qvalue, scale, bits)
    one = functools.partial(_PACK, layout)
    for _ in qvalue.shape[:-2]:
        one = jax.vmap(one)
    return PackedWeight.of(one(qvalue.astype(jnp.int8), scale), qvalue.shape[-1], layout)


_PACK = Op(
    lambda layout: f"pack_w{layout.bits}",
    lambda layout, qvalue, scale: layout.pack(qvalue, scale),
    results=lambda layout, qvalue, scale: layout.buffer(qvalue.shape[1]),
    attributes=lambda layout, *_: layout.attributes,
)


def layout_of(op: str, qvalue: jax.Array, scale: jax.Array, bits: int) -> Layout:
    """Check quantized values and scales, and return their layout.

    Raises:
        TypeError, ValueError: as ``pack_w8`` and ``pack_w4``.
    """
    allowed = ("int8", "int4") if bits == 4 else ("int8",)
    if qvalue.dtype.name not in allowed:
        raise TypeError(f"{op}: qvalue must be {' or '.join(allowed)}, got {qvalue.dtype.name}")
    floats = ("float32", "float16") if bits == 4 else ("float32",)
    if scale.dtype.name not in floats:
        raise TypeError(f"{op}: scale must be {' or '.join(floats)}, got {scale.dtype.name}")
    if qvalue.ndim < 2 or scale.ndim != qvalue.ndim:
        raise ValueError(
            f"{op}: qvalue and scale must have shapes [*lead, k, n] and [*lead, groups, n], got "
            f"{qvalue.shape} and {scale.shape}"
        )
    *lead, k, n = qvalue.shape
    groups = scale.shape[-2]
    if k == 0:
        raise ValueError(f"{op}: qvalue must have a row, got shape {qvalue.shape}")
    if scale.shape != (*lead, groups, n) or groups == 0 or k % groups:
        raise ValueError(
            f"{op}: scale must have shape [*{lead}, groups, {n}], with a number of groups that "
            f"divides the {k} rows of quantized values, got {scale.shape}"
        )
    group = 0 if groups == 1 else k // groups
    if group % GROUP_ALIGNMENT:
        raise ValueError(
            f"{op}: the rows of a group must be a multiple of {GROUP_ALIGNMENT}, got {groups} "
            f"groups of {group} rows. Quantize with another tile size."
        )
    return Layout(k, bits, group, scale.dtype.name)
