"""QArray: quantized values with scales, as a pytree; what ops take."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from hijax_trace import Move, MoveError, Part
from interception_core import hide_frames, quick_init
from quant_numerics.array import moves
from quant_numerics.array.explicit import sharded_like
from quant_numerics.array.stored import Parts, StoredForm, is_form, register_serialization
from quant_numerics.array.tiles import RaggedTiles, Slices, ragged_tiles, slices_of
from quant_numerics.formats.encoding import decode, whole_scale
from quant_numerics.formats.qtypes import QType, compute_dtype, float_dtype, get_qtype

hide_frames(Path(__file__).parent.parent)


class ScaledForm(StoredForm):
    """Quantized values in some storage, with scales of the same axes."""

    scale: jax.Array
    ragged_tiles: RaggedTiles

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Return the shape of the scales."""
        return self.scale.shape

    @property
    def slices(self) -> Slices:
        """Return the sets of elements that share a scale."""
        return slices_of(self.shape, self.scale.shape, self.ragged_tiles)

    @property
    def nbytes(self) -> int:
        """Return the bytes of its arrays, with sub-byte dtypes packed."""
        return stored_bytes(self)

    def to_parts(self, scale_shape: Sequence[int] | None = None) -> Parts:
        """Return its arrays, and what they are; see ``StoredForm``."""
        about: dict[str, Any] = {
            "shape": list(self.shape),
            "dtype": jnp.dtype(self.dtype).name,
            "qtype": self.qtype,
        }
        if self.ragged_tiles:
            about["ragged_tiles"] = [list(pair) for pair in self.ragged_tiles]
        return Parts(self.kind, about, self.arrays())

    def astype(self, dtype: DTypeLike) -> Self:
        """Change the logical dtype, to a supported float dtype; nothing is rounded."""
        dtype = float_dtype(dtype, f"the logical dtype of a {type(self).__name__}")
        return dataclasses.replace(self, dtype=dtype)  # type: ignore[type-var]

    def parts(self) -> dict[str, Part]:
        """Return scales and zero points, per slice."""
        scales = {name: Part(getattr(self, name), zero=1) for name in ("scale", "global_scale")}
        return {**scales, "zero_point": Part(self.zero_point)}

    def move(self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]) -> Move:
        """Return a primitive as a move of such arrays; see ``ArrayProxy.move``."""
        how = super().move(primitive, params, operands)
        return how._replace(tiles={self.ndim + axis: tile for axis, tile in self.ragged_tiles})

    def moved(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Apply a primitive that only moves elements."""
        results = super().moved(primitive, params, operands)
        return moves.retiled(results, self, primitive, params, operands)


# eq=False: comparing fields would ask arrays for a truth value; identity is what is meant.
@jax.tree_util.register_dataclass
@quick_init
@dataclasses.dataclass(frozen=True, eq=False)
class QArray(ScaledForm):
    """Quantized values and scales that stand for a float array; a pytree.

    It stands for ``(value(qvalue) - zero_point) * scale * global_scale``, where ``value`` looks
    up an index of kind "codebook", and is the number itself for the other kinds.

    Build one with ``quantize`` or, from parts, with ``qarray``: these check their arguments. The
    class itself checks nothing, since pytree transformations also build it, from tracers,
    ShapeDtypeStructs or None. Under ``vmap`` and ``scan`` the mapped axis must have full size in
    the scale too, that is, be a channel axis.

    It is an array proxy: an argument of a function that TraceEngine wraps may hold QArrays where
    the function expects arrays.

    Attributes:
      qvalue: quantized values, any shape, dtype ``get_qtype(qtype).storage_dtype``.
      scale: dtype ``get_qtype(qtype).scale_dtype``, or bfloat16 or float16 for float32; same ndim
        as `qvalue`; along each axis its size is 1 (one scale for all), the full size (one per
        index) or the number of tiles.
      zero_point: None (symmetric), or the quantized values that stand for 0: shape of the scale,
        dtype of `qvalue`; only for kind "int".
      global_scale: None, or the float32 scale of the scales: same ndim, along each axis 1 or the
        scale's size; only for the two-level format nvfp4.
      qtype: name of the quantized type (static).
      dtype: float dtype that the array stands for and dequantizes to (static).
      ragged_tiles: the tile size of each axis whose last tile is shorter, as pairs of the axis,
        counted from the last (-1), and the size (static): vmap and scan may add leading axes.
        Elsewhere the shapes of values and scales tell it.
    """

    kind: ClassVar[str] = "qarray"

    qvalue: jax.Array
    # pyrefly: ignore [bad-override]
    scale: jax.Array
    zero_point: jax.Array | None = None
    global_scale: jax.Array | None = None
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
        return self.qvalue.shape

    def restore(self) -> jax.Array:
        """Return the dequantized array; see ``dequantize``."""
        return sharded_like(_restored, self.qvalue, self)

    def unpacked(self) -> "QArray":
        """Return itself."""
        return self

    @classmethod
    def from_parts(cls, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> "QArray":
        """Return the QArray of its arrays; see ``StoredForm``."""
        optional = {name: arrays.get(name) for name in ("zero_point", "global_scale")}
        tiles = dict(stored_tiles(about))
        given = arrays["qvalue"], arrays["scale"], about["qtype"], about["dtype"]
        return qarray(*given, **optional, tile_axes=tiles)

    def parts(self) -> dict[str, Part]:
        """Return quantized values (per element), scales and zero points (per slice)."""
        book = qtype_of(self).codebook
        zero = 0 if book is None or not qtype_of(self).has_zero else book.index(0.0)
        return {"qvalue": Part(self.qvalue, True, zero), **super().parts()}

    def move(self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]) -> Move:
        """Return a primitive as a move of QArrays; see ``ArrayProxy.move``."""
        if self.zero_point is not None and primitive in ("pad", "select_n"):
            raise MoveError(f"{primitive} of quantized values with zero points")
        if not qtype_of(self).has_zero and primitive in ("pad", "select_n"):
            raise MoveError(f"{primitive} of {self.qtype}, which has no zero")
        if self.global_scale is not None and primitive == "concatenate":
            raise MoveError("concatenate of arrays that each have a global scale")
        return super().move(primitive, params, operands)

    def swapaxes(self, axis1: int, axis2: int) -> "QArray":
        """Exchange two axes."""
        order = list(range(self.ndim))
        order[axis1], order[axis2] = order[axis2], order[axis1]
        return self.transpose(order)

    def reshape(self, *shape: int | Sequence[int]) -> "QArray":
        """Reshape quantized values and scales, as NumPy's method.

        Raises:
          ValueError: a shape of another size, or one whose axes scales can't follow, such as an
            axis that merges one with a single scale and, after it, one with many.
        """
        given: Any = shape[0] if len(shape) == 1 and not hasattr(shape[0], "__index__") else shape
        return moves.reshape(self, moves.resolved_shape(self, given))

    def __getitem__(self, key: Any) -> "QArray":
        """Index with integers, slices, None and Ellipsis; see ``take`` for arrays."""
        return moves.index(self, key)

    def __iter__(self) -> Any:
        """Iterate over the first axis."""
        return (self[i] for i in range(self.shape[0]))


def _restored(q: QArray) -> jax.Array:
    compute, cut = compute_dtype(q.dtype), q.slices
    values = cut.split(decode(q.qvalue, qtype_of(q), compute))
    if q.zero_point is not None:
        values = values - cut.split(q.zero_point.astype(compute))
    scale = cut.split(effective_scale(q).astype(compute))
    return cut.join(values * scale).astype(q.dtype)


register_serialization(QArray)


def stored_tiles(about: Mapping[str, Any]) -> RaggedTiles:
    """Return the tiles of axes whose last tile is shorter, of what ``to_parts`` says."""
    return tuple((axis, tile) for axis, tile in about.get("ragged_tiles", ()))


def stored_bytes(tree: Any) -> int:
    """Return the bytes of a pytree of arrays, with sub-byte dtypes packed."""
    return sum(-(-x.size * _BITS.get(x.dtype.name, 8 * x.dtype.itemsize) // 8)
               for x in jax.tree.leaves(tree))  # fmt: skip


_BITS = {"int2": 2, "uint2": 2, "int4": 4, "uint4": 4, "float4_e2m1fn": 4}


def qarray(
    qvalue: ArrayLike,
    scale: ArrayLike,
    qtype: str | DTypeLike,
    dtype: DTypeLike,
    *,
    zero_point: ArrayLike | None = None,
    global_scale: ArrayLike | None = None,
    tile_axes: Mapping[int, int] | None = None,
) -> QArray:
    """Build a QArray from quantized values and scales, checking that they fit.

    Args:
      qvalue: quantized values, of the qtype's storage dtype; integers in the qtype's `asymmetric`
        range (``quantize`` keeps to ``[-qmax, qmax]`` without a zero point). The range is not
        checked (values may be traced), but the int32 overflow bounds of the ops rely on it.
      scale: the qtype's scale dtype, or bfloat16 or float16 for float32; same ndim; each axis 1,
        the full size, or the number of tiles.
      qtype: a qtype.
      dtype: logical dtype: bfloat16, float16, float32 or float64 (under x64).
      zero_point: quantized values that stand for 0, of the scale's shape and the storage dtype;
        kind "int" only.
      global_scale: float32, same ndim; each axis 1 or the scale's size; nvfp4 must have it.
      tile_axes: axis -> tile size; needed only where the last tile of an axis is shorter.

    Raises:
      ValueError: unknown qtype, a shape that does not fit, or a part that the qtype doesn't have.
      TypeError: a wrong dtype.
    """
    kind = get_qtype(qtype)
    qvalue, scale = jnp.asarray(qvalue), jnp.asarray(scale)
    if qvalue.dtype != kind.storage_dtype:
        raise TypeError(
            f"qvalue must be {kind.storage_dtype.name} for qtype {kind.name!r}, got "
            f"{qvalue.dtype.name}. Convert it with .astype(jnp.{kind.storage_dtype.name})."
        )
    if scale.dtype not in kind.scale_dtypes:
        allowed = " or ".join(dtype.name for dtype in kind.scale_dtypes)
        raise TypeError(
            f"scale must be {allowed}, got {scale.dtype.name}. Convert it with .astype before the "
            "quantized values are chosen."
        )
    ragged = ragged_tiles(qvalue.shape, tile_axes or {})
    slices_of(qvalue.shape, scale.shape, ragged)
    if zero_point is not None:
        zero_point = jnp.asarray(zero_point)
        _check_zero_point(zero_point, scale, kind)
    if (global_scale is not None) != kind.two_level:
        raise ValueError(
            f"global_scale must be {'given' if kind.two_level else 'None'} for qtype "
            f"{kind.name!r}, got {'None' if kind.two_level else 'one'}. "
            f"{'Give one' if kind.two_level else 'Leave it out'}."
        )
    if global_scale is not None:
        global_scale = jnp.asarray(global_scale)
        _check_global_scale(global_scale, scale)
    return QArray(
        qvalue,
        scale,
        zero_point,
        global_scale,
        qtype=kind.name,
        dtype=float_dtype(dtype, "the logical dtype of a QArray"),
        ragged_tiles=ragged,
    )


def _check_zero_point(zero_point: jax.Array, scale: jax.Array, kind: QType) -> None:
    if kind.asymmetric is None:
        raise ValueError(
            f"zero_point must be None for qtype {kind.name!r}: only integer qtypes have one, got "
            f"{zero_point.dtype.name}. Leave it out."
        )
    if zero_point.dtype != kind.storage_dtype:
        raise TypeError(
            f"zero_point must have the dtype of qvalue, {kind.storage_dtype.name}, got "
            f"{zero_point.dtype.name}. Convert it with .astype."
        )
    if zero_point.shape != scale.shape:
        raise ValueError(
            f"zero_point must have the scale's shape {scale.shape}, got {zero_point.shape}. "
            "Reshape it."
        )


def _check_global_scale(global_scale: jax.Array, scale: jax.Array) -> None:
    if global_scale.dtype != jnp.float32:
        raise TypeError(
            f"global_scale must be float32, got {global_scale.dtype.name}. Convert it with .astype."
        )
    if global_scale.ndim != scale.ndim or any(
        g not in (1, s) for g, s in zip(global_scale.shape, scale.shape, strict=True)
    ):
        raise ValueError(
            f"global_scale must have the axes of a scale of shape {scale.shape}, each of size 1 "
            f"or of the scale's, got shape {global_scale.shape}. Reshape it."
        )


def qtype_of(q: QArray) -> QType:
    """Return the QType of a QArray."""
    return get_qtype(q.qtype)


def effective_scale(q: QArray) -> jax.Array:
    """Return ``scale * global_scale`` as float32, of the scale's shape."""
    return whole_scale(q.scale, q.global_scale)


Operand: TypeAlias = Any
"""What ops take: a QArray, another StoredForm, or a float array."""


_OTHERS: dict[type, tuple[Callable[[Any], QArray], Callable[[Any], jax.Array]]] = {}


def register_operand(
    form: type, to_qarray: Callable[[Any], QArray], restore: Callable[[Any], jax.Array]
) -> None:
    """Let ops and ``dequantize`` take values of a class or JAX type that is no ``StoredForm``.

    Args:
      form: the class of values, or of the types of traced values.
      to_qarray: makes QArrays of them.
      restore: dequantizes them.
    """
    _OTHERS[form] = to_qarray, restore


def _other(x: Any) -> Any:
    """Return how a value of a registered class becomes a QArray and an array; None for others."""
    return _OTHERS.get(type(jax.typeof(x)) if isinstance(x, jax.core.Tracer) else type(x))


def dequantize(q: Operand) -> jax.Array:
    """Dequantize a QArray, or another stored form, to an array of its shape and logical dtype.

    Each value is multiplied by its scale in float32 (float64 for logical float64), then rounded.
    In a slice with an infinity or a NaN every element is non-finite: infinities keep their sign,
    the rest is NaN.

    Args:
      q: a QArray, or another form of one.

    Raises:
      TypeError: `q` is neither a QArray nor another form of one.
    """
    if is_form(q):
        return q.restore()
    if (other := _other(q)) is not None:
        return other[1](q)
    raise TypeError(
        f"what dequantize takes must be a QArray, got {type(q).__name__}. Use arrays as they are."
    )


def as_operand(x: Any, what: str) -> QArray | jax.Array:
    """Return `x` as a QArray or a float array, or raise TypeError, with its name."""
    if is_form(x):
        return found if isinstance(found := x.unpacked(), QArray) else x.restore()
    if (other := _other(x)) is not None:
        return other[0](x)
    x = jnp.asarray(x)
    float_dtype(x.dtype, f"{what}, where not a QArray,")
    return x
