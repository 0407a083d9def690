"""The static arguments of attention, and checks of all arguments."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from .. import checks
from .types import AttnBiasType, AttnMaskType, AttnSoftmaxType, QKVLayout


@dataclasses.dataclass(frozen=True)
class Config:
    """The static arguments of attention."""

    bias_type: AttnBiasType
    mask_type: AttnMaskType
    softmax_type: AttnSoftmaxType
    layout: QKVLayout
    scaling_factor: float
    dropout_probability: float
    is_training: bool
    max_segments_per_seq: int
    window_size: tuple[int, int]
    checkpoint_name: str = "context"
    context_axes: tuple[str, ...] = ()

    @property
    def has_bias(self) -> bool:
        """Return whether there is a bias."""
        return self.bias_type is not AttnBiasType.NO_BIAS

    @property
    def dropout(self) -> float:
        """Return the dropout probability that is in effect."""
        return self.dropout_probability if self.is_training else 0.0


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The sizes of the arrays of a call."""

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    qk_size: int
    v_size: int

    @property
    def out(self) -> tuple[int, ...]:
        """Return the shape of the result."""
        return self.batch, self.q_length, self.heads, self.v_size

    def aux(self, layout: QKVLayout) -> tuple[int, ...]:
        """Return the shape of the log-sum-exp."""
        if layout.is_thd():
            return self.batch, self.q_length, self.heads, 1
        return self.batch, self.heads, self.q_length, 1


def make_config(
    op: str,
    attn_bias_type: Any,
    attn_mask_type: Any,
    qkv_layout: Any,
    softmax_type: Any,
    scaling_factor: float,
    dropout_probability: float,
    is_training: bool,
    max_segments_per_seq: int,
    window_size: Sequence[int] | None,
    context_parallel_axis: str | Sequence[str],
) -> Config:
    """Check the static arguments of an op, and return its config.

    The arguments are those of ``fused_attn``, and `op`, the name in errors.

    Raises:
        ValueError, NotImplementedError: as ``fused_attn``.
    """
    layout = checks.member(op, "qkv_layout", qkv_layout, QKVLayout)
    mask = checks.member(op, "attn_mask_type", attn_mask_type, AttnMaskType)
    bias = checks.member(op, "attn_bias_type", attn_bias_type, AttnBiasType)
    if layout.is_thd() and not mask.is_padding():
        raise ValueError(
            f"{op}: attn_mask_type must have padding with qkv_layout {layout.name}, whose segments "
            f"have lengths, got {mask.name}"
        )
    if layout.is_thd() and bias is not AttnBiasType.NO_BIAS:
        raise NotImplementedError(
            f"{op}: attn_bias_type must be NO_BIAS with qkv_layout {layout.name}, got {bias.name}. "
            "Packed segments have no bias."
        )
    if not layout.is_thd() and max_segments_per_seq != 1:
        raise ValueError(
            f"{op}: max_segments_per_seq must be 1 with qkv_layout {layout.name}, got "
            f"{max_segments_per_seq}. Several segments need a THD layout."
        )
    if max_segments_per_seq < 1:
        raise ValueError(
            f"{op}: max_segments_per_seq must be 1 or more, got {max_segments_per_seq}"
        )
    if not 0 <= dropout_probability < 1:
        raise ValueError(f"{op}: dropout_probability must be in [0, 1), got {dropout_probability}")
    window = (-1, -1) if window_size is None else tuple(window_size)
    if len(window) != 2 or not all(isinstance(size, int) and size >= -1 for size in window):
        raise ValueError(
            f"{op}: window_size must be two ints, left and right, -1 without end, or "
            f"None, got {window_size}"
        )
    axes = context_parallel_axis
    axes = (axes,) if isinstance(axes, str) else tuple(axes)
    found = Config(
        bias,
        mask,
        checks.member(op, "softmax_type", softmax_type, AttnSoftmaxType),
        layout,
        float(scaling_factor),
        float(dropout_probability),
        bool(is_training),
        int(max_segments_per_seq),
        (window[0], window[1]),
        context_axes=axes,
    )
    why = unshared(found) if axes else None
    if why:
        raise NotImplementedError(
            f"{op}: context_parallel_axis is {context_parallel_axis!r}, and a sequence can't be "
            f"shared out: {why}. Gather it."
        )
    return found


def unshared(config: Config) -> str | None:
    """Return why a sequence can't be shared out, or None."""
    if config.layout.is_thd():
        return f"qkv_layout is {config.layout.name}, whose segments are packed"
    if config.dropout > 0:
        return "random numbers of dropout depend on places in the whole sequence"
    if config.mask_type is AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK:
        return f"attn_mask_type is {config.mask_type.name}, which depends on both lengths"
    return None


def sizes_of(op: str, qkv: Sequence[jax.Array], layout: QKVLayout) -> Sizes:
    """Check arrays, and return their sizes."""
    count = layout.arrays
    if len(qkv) != count:
        raise ValueError(
            f"{op}: qkv has {len(qkv)} arrays, and qkv_layout is {layout.name}, with which it must "
            f"have {count}"
        )
    for array in qkv:
        if array.dtype not in checks.FLOATS or array.dtype != qkv[0].dtype:
            raise TypeError(
                f"{op}: qkv must be of one dtype, float32, bfloat16 or float16, got "
                f"{', '.join(one.dtype.name for one in qkv)}"
            )
    shapes = [array.shape for array in qkv]
    found = _parsed(shapes, layout)
    if found is None:
        wanted = {
            1: "[b, s, 3, h, d]",
            2: "[b, sq, h, d] and [b, skv, 2, g, d]",
            3: "[b, sq, h, d], [b, skv, g, d] and [b, skv, g, dv]",
        }
        raise ValueError(
            f"{op}: qkv must have shapes {wanted[count]} with qkv_layout {layout.name}, of no size "
            f"0 but b and s, got {', '.join(map(str, shapes))}"
        )
    if found.heads % found.kv_heads:
        raise ValueError(
            f"{op}: the heads of queries in qkv must be a multiple of those of keys, "
            f"{found.kv_heads}, got {found.heads}"
        )
    return found


def _parsed(shapes: Sequence[tuple[int, ...]], layout: QKVLayout) -> Sizes | None:
    if layout.is_qkvpacked():
        if len(shapes[0]) != 5 or shapes[0][2] != 3:
            return None
        b, s, _, h, d = shapes[0]
        q, k, v = (b, s, h, d), (b, s, h, d), (b, s, h, d)
    elif layout.is_kvpacked():
        if len(shapes[0]) != 4 or len(shapes[1]) != 5 or shapes[1][2] != 2:
            return None
        q = shapes[0]
        k = v = (*shapes[1][:2], *shapes[1][3:])
    else:
        if any(len(shape) != 4 for shape in shapes):
            return None
        q, k, v = shapes
    if q[0] != k[0] or k[:3] != v[:3] or q[3] != k[3] or 0 in (*q[2:], *k[2:], *v[2:]):
        return None
    return Sizes(q[0], q[1], k[1], q[2], k[2], q[3], v[3])


def check_bias(op: str, config: Config, sizes: Sizes, bias: Any, dtype: Any, parts: int) -> None:
    """Raise if a bias is missing, unwanted, or doesn't fit.

    Args:
        op: name of the op, for errors.
        config: config of the call.
        sizes: sizes of the arrays.
        bias: the bias that is given, or None.
        dtype: dtype of the arrays.
        parts: number of parts that the sequence of keys is cut into; `sizes` has one part.
    """
    if config.bias_type is AttnBiasType.NO_BIAS:
        if bias is not None:
            raise ValueError(
                f"{op}: bias must be None with attn_bias_type NO_BIAS, got {bias.shape}"
            )
        return
    if bias is None:
        raise ValueError(f"{op}: bias must be an array with {config.bias_type.name}, got None")
    if bias.dtype != dtype:
        raise TypeError(f"{op}: bias must be {dtype.name}, as qkv, got {bias.dtype.name}")
    rest = (sizes.q_length, sizes.kv_length * parts)
    if (
        bias.ndim != 4
        or bias.shape[2:] != rest
        or (bias.shape[0] not in (1, sizes.batch) or bias.shape[1] not in (1, sizes.heads))
    ):
        raise ValueError(
            f"{op}: bias must have shape (1 or {sizes.batch}, 1 or {sizes.heads}, "
            f"{rest[0]}, {rest[1]}), got {bias.shape}"
        )


def check_array(
    op: str, name: str, array: jax.Array, shape: tuple[int, ...], dtype: Any
) -> jax.Array:
    """Return the array, which must have this shape and dtype."""
    checks.dtype(op, name, array.dtype, (dtype,))
    checks.shape(op, name, array, shape)
    return array
