"""Packing of weights, done once: its result is a parameter."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from ..op import Op
from .layout import GROUP_ALIGNMENT, TABLES, Layout
from .weight import PackedWeight


def pack_w8(qvalue: jax.Array, scale: jax.Array, *, platform: str | None = None) -> PackedWeight:
    """Pack a weight in 8 bits, for ``gemm_w8a8`` and ``gemm_w8a16``.

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


def pack_w4(
    qvalue: jax.Array,
    scale: jax.Array,
    *,
    table: str = "int4",
    column_scale: jax.Array | None = None,
    platform: str | None = None,
) -> PackedWeight:
    """Pack a weight in 4 bits, for ``gemm_w4a16`` and ``gemm_w4a8``.

    Args:
        qvalue: int4[*lead, k, n], or int8 between -8 and 7 (values beyond are an error of the
            kernel on CPU, and wrap around elsewhere). For another table than "int4", places in it:
            uint4, or int8 between 0 and 15.
        scale: float32 or float16 [*lead, groups, n], as for ``pack_w8``. Scales are stored as they
            are: in groups of 32, float16 takes 4.5 bits a weight, and float32 takes 5. Round scales
            to float16 before the quantized values are chosen, not after, and only if all of them
            fit. Of the table "e2m1" they may be float8_e8m0fnu (4.25 bits) or float8_e4m3fn.
        table: what quantized values stand for. "int4": themselves. "e2m1": the float4_e2m1fn of
            these bits (OCP Microscaling Formats v1.0). "iq4_nl": llama.cpp's 16 integers from -127
            to 113. "nf4": the 16 quantiles of QLoRA (arXiv:2305.14314), which kernels have within
            8e-6; it needs more than one group.
        column_scale: float32[*lead, n] with scales in float8_e4m3fn, by which those of a column are
            multiplied.
        platform: as for ``pack_w8``.

    Returns:
        The packed weight.

    Raises:
        TypeError: another dtype.
        ValueError: shapes that ``pack_w8`` would refuse, another table, or one without groups that
            needs them.
    """
    return _pack("pack_w4", qvalue, scale, 4, table, column_scale)


def _pack(
    op: str,
    qvalue: jax.Array,
    scale: jax.Array,
    bits: int,
    table: str = "int4",
    column_scale: jax.Array | None = None,
) -> PackedWeight:
    layout = layout_of(op, qvalue, scale, bits, table)
    more = ()
    if layout.has_column_scale != (column_scale is not None):
        raise ValueError(
            f"{op}: column_scale must be given with scales in float8_e4m3fn, and only then, got "
            f"scales in {layout.scale_dtype}"
        )
    if column_scale is not None:
        wanted = (*qvalue.shape[:-2], qvalue.shape[-1])
        if column_scale.shape != wanted or column_scale.dtype != jnp.float32:
            raise ValueError(
                f"{op}: column_scale must be float32{list(wanted)}, got {jax.typeof(column_scale)}"
            )
        # Kernels read the bits of a scale that is NaN as a number.
        is_nan = jnp.isnan(scale.astype(jnp.float32)).any(-2)
        more = (jnp.where(is_nan, jnp.float32(jnp.nan), column_scale),)
    one = functools.partial(_PACK, layout)
    for _ in qvalue.shape[:-2]:
        one = jax.vmap(one)
    return PackedWeight.of(one(qvalue.astype(jnp.int8), scale, *more), qvalue.shape[-1], layout)


_PACK = Op(
    lambda layout: f"pack_w{layout.bits}",
    lambda layout, qvalue, *scales: layout.pack(qvalue, *scales),
    results=lambda layout, qvalue, *scales: layout.buffer(qvalue.shape[1]),
    attributes=lambda layout, *_: layout.attributes,
    asked=lambda layout, qvalue, *scales: ((qvalue, *scales), layout.question),
)


def layout_of(
    op: str, qvalue: jax.Array, scale: jax.Array, bits: int, table: str = "int4"
) -> Layout:
    """Check quantized values and scales, and return their layout.

    Raises:
        TypeError, ValueError: as ``pack_w8`` and ``pack_w4``.
    """
    if table not in TABLES:
        raise ValueError(f"{op}: table must be one of {', '.join(TABLES)}, got {table!r}")
    allowed = ("int8",) if bits == 8 else ("int8", "int4" if table == "int4" else "uint4")
    if qvalue.dtype.name not in allowed:
        raise TypeError(f"{op}: qvalue must be {' or '.join(allowed)}, got {qvalue.dtype.name}")
    floats = ("float32", "float16") if bits == 4 else ("float32",)
    floats += ("float8_e8m0fnu", "float8_e4m3fn") if table == "e2m1" else ()
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
    if group == 0 and len(TABLES[table].parts) > 1:
        raise ValueError(f"{op}: {table} must have more than one group, got scales {scale.shape}")
    return Layout(k, bits, group, scale.dtype.name, table)
