"""QArray: integer codes with float32 scales, as a pytree."""

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from quant_numerics._qtypes import QType, float_dtype, get_qtype


# eq=False: comparing fields would ask arrays for a truth value; identity is what is meant.
@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class QArray:
    """A quantized array, ``qvalue * scale`` in meaning; a pytree with leaves qvalue and scale.

    Build one with ``quantize`` or, from parts, with ``qarray``: these check their arguments. The
    class itself checks nothing, since pytree transformations also build it, from tracers,
    ShapeDtypeStructs or None. Under ``vmap`` and ``scan`` the mapped axis must have full size in
    the scale too, that is, be a channel axis.

    Attributes:
      qvalue: integer codes, any shape, dtype ``get_qtype(qtype).storage_dtype``.
      scale: float32, same ndim as `qvalue`; along each axis its size is 1 (one scale for all),
        the full size (one per index) or a divisor of it, the number of tiles.
      qtype: name of the quantized type (static).
      dtype: float dtype that the array stands for and dequantizes to (static).
    """

    qvalue: jax.Array
    scale: jax.Array
    qtype: str = dataclasses.field(metadata={"static": True})
    dtype: np.dtype = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array that this stands for, that of `qvalue`."""
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self.qvalue.ndim


Operand: TypeAlias = QArray | ArrayLike


def qarray(qvalue: ArrayLike, scale: ArrayLike, qtype: str, dtype: DTypeLike) -> QArray:
    """Builds a QArray from codes and scales, checking that they fit.

    Args:
      qvalue: codes in ``[-qmax, qmax]``, of the qtype's storage dtype. The range is not checked
        (values may be traced), but the int32 overflow bounds of the ops rely on it.
      scale: float32, same ndim; each axis 1, the full size, or a divisor of it.
      qtype: a name in ``QTYPES``.
      dtype: logical dtype: bfloat16, float16, float32 or float64 (under x64).

    Raises:
      ValueError: unknown qtype, or a scale whose shape does not fit.
      TypeError: a wrong dtype.
    """
    kind = get_qtype(qtype)
    qvalue, scale = jnp.asarray(qvalue), jnp.asarray(scale)
    if qvalue.dtype != kind.storage_dtype:
        raise TypeError(
            f"qtype {qtype!r} stores codes as {kind.storage_dtype.name}, got qvalue of dtype "
            f"{qvalue.dtype.name}; convert it with .astype(jnp.{kind.storage_dtype.name})"
        )
    if scale.dtype != jnp.float32:
        raise TypeError(f"scale must be float32, got {scale.dtype.name}; convert it with .astype")
    fits = scale.ndim == qvalue.ndim and all(
        s in (1, n) or (s > 0 and n % s == 0)
        for s, n in zip(scale.shape, qvalue.shape, strict=True)
    )
    if not fits:
        raise ValueError(
            f"scale of shape {scale.shape} does not fit qvalue of shape {qvalue.shape}: it needs "
            "the same number of axes, each of size 1, of the full size, or of a divisor of the "
            "full size (the number of tiles)"
        )
    return QArray(qvalue, scale, qtype, float_dtype(dtype, "the logical dtype of a QArray"))


def qtype_of(q: QArray) -> QType:
    """The QType of a QArray."""
    return get_qtype(q.qtype)


def as_operand(x: Any, what: str) -> QArray | jax.Array:
    """`x` as a QArray or a float array; a TypeError names `what` otherwise."""
    if isinstance(x, QArray):
        return x
    x = jnp.asarray(x)
    float_dtype(x.dtype, f"{what}, where not a QArray,")
    return x


def tile_sizes(q: QArray) -> dict[int, int]:
    """Tile size of each tiled axis: those whose scale is neither one nor one per index."""
    sizes = zip(q.qvalue.shape, q.scale.shape, strict=True)
    return {axis: n // s for axis, (n, s) in enumerate(sizes) if s not in (1, n)}


def split_axes(x: jax.Array, tiles: Mapping[int, int]) -> tuple[jax.Array, list[int]]:
    """Splits each axis in `tiles` in two, (number of tiles, tile size).

    Returns:
      The reshaped array and, for each old axis, its new position. For a split axis this is the
      position of the inner part; the tile index is the axis before it.
    """
    shape: list[int] = []
    where: list[int] = []
    for axis, size in enumerate(x.shape):
        tile = tiles.get(axis)
        shape.extend((size,) if tile is None else (size // tile, tile))
        where.append(len(shape) - 1)
    return (x.reshape(shape) if tiles else x), where
