"""Packed storage: quantized values in no more bits than they need."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from hijax_trace import MoveError, Part
from interception_core import quick_init
from quant_numerics.array.qarray import (
    QArray,
    ScaledForm,
    qarray,
    qtype_of,
    stored_tiles,
)
from quant_numerics.array.stored import register_serialization
from quant_numerics.array.tiles import RaggedTiles
from quant_numerics.formats.qtypes import QType, get_qtype


@jax.tree_util.register_dataclass
@quick_init
@dataclasses.dataclass(frozen=True, eq=False)
class PackedQArray(ScaledForm):
    """A QArray whose quantized values are stored as bit planes; a pytree.

    Ops take it like a QArray and unpack it first. Under ``scan`` and ``vmap`` any axis but the
    last may be mapped.

    Attributes:
      planes: uint8, shape ``(*shape[:-1], bits, ceil(shape[-1] / 8))``: bit k of byte j in plane b
        is bit b of the quantized value at index ``8 * j + k`` of the last axis.
      scale: as in ``QArray``.
      zero_point: as in ``QArray``.
      global_scale: as in ``QArray``.
      last: size of the last axis (static).
      qtype: name of the quantized type (static).
      dtype: float dtype that the array stands for (static).
      ragged_tiles: as in ``QArray`` (static).
    """

    kind: ClassVar[str] = "packed"

    planes: jax.Array
    # pyrefly: ignore [bad-override]
    scale: jax.Array
    zero_point: jax.Array | None = None
    global_scale: jax.Array | None = None
    last: int = dataclasses.field(kw_only=True, metadata={"static": True})
    # pyrefly: ignore [bad-override]
    qtype: str = dataclasses.field(kw_only=True, metadata={"static": True})
    # pyrefly: ignore [bad-override]
    dtype: np.dtype = dataclasses.field(kw_only=True, metadata={"static": True})
    # pyrefly: ignore [bad-override]
    ragged_tiles: RaggedTiles = dataclasses.field(
        default=(), kw_only=True, metadata={"static": True}
    )

    @property
    # pyrefly: ignore [bad-override]
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the array that this stands for."""
        return (*self.planes.shape[:-2], self.last)

    def restore(self) -> jax.Array:
        """Return the dequantized array."""
        return unpack(self).restore()

    def unpacked(self) -> QArray:
        """Return the QArray that was packed."""
        return unpack(self)

    @classmethod
    def from_parts(cls, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> "PackedQArray":
        """Return the packed array of its arrays; see ``StoredForm``."""
        last, bits = about["shape"][-1], get_qtype(about["qtype"]).bits
        shape = (*about["shape"][:-1], bits, -(-last // 8))
        if arrays["planes"].shape != shape:
            raise ValueError(f"planes of shape {arrays['planes'].shape} are not {shape}")
        result = cls(
            arrays["planes"],
            arrays["scale"],
            arrays.get("zero_point"),
            last=last,
            qtype=about["qtype"],
            dtype=jnp.dtype(about["dtype"]),
            ragged_tiles=stored_tiles(about),
        )
        # Unpacked as a type, it passes the checks of any QArray: nothing is computed.
        types = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), result)
        jax.eval_shape(lambda p: _checked(unpack(p)), types)
        return result

    def parts(self) -> dict[str, Part]:
        """Return planes (all axes but the last), scales and zero points."""
        return {"planes": Part(self.planes, True, axes=self.ndim - 1), **super().parts()}

    def moved(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Apply a primitive that only moves elements.

        The result is a QArray if the last axis moves, because that axis is in the planes.
        """
        try:
            return super().moved(primitive, params, operands)
        except MoveError:
            unpacked = [unpack(x) if isinstance(x, PackedQArray) else x for x in operands]
            return unpack(self).moved(primitive, params, unpacked)


def pack(q: QArray) -> PackedQArray:
    """Pack quantized values that are stored in too many bits.

    Of the formats of this package these are int3, int5, int6 and int7; ``QType.packable`` tells.

    Args:
      q: a QArray of such a format, with at least one axis.

    Raises:
      ValueError: a qtype that is stored without a gap, or an array without axes.
    """
    kind = qtype_of(q)
    if not kind.packable:
        raise ValueError(
            "the qtype of what pack takes must have fewer bits than its storage dtype, such as "
            f"int3, int5, int6 and int7, got {kind.name!r}. Use the QArray as it is."
        )
    if q.ndim == 0:
        raise ValueError(
            "what pack takes must have an axis to pack along, got a scalar. Use it as it is."
        )
    last = q.shape[-1]
    # The low bits of a byte are the value: two's complement, or an index.
    values = q.qvalue.astype(_byte(kind))
    values = jax.lax.bitcast_convert_type(values, jnp.uint8)
    values = jnp.pad(values, [(0, 0)] * (q.ndim - 1) + [(0, -last % 8)])
    values = values.reshape(*q.shape[:-1], 1, -(-last // 8), 8)
    bits = (values >> _counting(kind.bits, 3, values.ndim)) & np.uint8(1)
    places = bits << _counting(8, 1, values.ndim)
    planes = places.sum(-1, dtype=jnp.uint8)
    return PackedQArray(
        planes,
        q.scale,
        q.zero_point,
        q.global_scale,
        last=last,
        qtype=q.qtype,
        dtype=q.dtype,
        ragged_tiles=q.ragged_tiles,
    )


def unpack(p: PackedQArray) -> QArray:
    """Return the QArray that was packed."""
    kind = get_qtype(p.qtype)
    planes = jnp.expand_dims(p.planes, -1)
    bits = (planes >> _counting(8, 1, planes.ndim)) & np.uint8(1)
    values = (bits << _counting(kind.bits, 3, planes.ndim)).sum(-3, dtype=jnp.uint8)
    values = values.reshape(*values.shape[:-2], 8 * values.shape[-2])[..., : p.last]
    # The highest bit, moved to the byte's own and back, fills the bits above it: with the sign, or
    # with zeros for indices.
    unused = 8 - kind.bits
    byte = _byte(kind)
    values = jax.lax.bitcast_convert_type(values << np.uint8(unused), byte) >> byte.type(unused)
    return QArray(
        values.astype(kind.storage_dtype),
        p.scale,
        p.zero_point,
        p.global_scale,
        qtype=p.qtype,
        dtype=p.dtype,
        ragged_tiles=p.ragged_tiles,
    )


def _checked(q: QArray) -> QArray:
    optional = {"zero_point": q.zero_point, "tile_axes": dict(q.ragged_tiles)}
    return qarray(q.qvalue, q.scale, q.qtype, q.dtype, **optional)


def _byte(kind: QType) -> np.dtype:
    """Return the dtype of a byte that holds one quantized value."""
    return np.dtype(np.int8 if kind.kind == "int" else np.uint8)


def _counting(n: int, axis_from_end: int, ndim: int) -> jax.Array:
    """Return ``arange(n)`` in uint8 along one of `ndim` axes."""
    shape = [1] * ndim
    shape[-axis_from_end] = n
    return jnp.arange(n, dtype=jnp.uint8).reshape(shape)


register_serialization(PackedQArray)
