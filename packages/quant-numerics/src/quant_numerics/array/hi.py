"""A quantized array as one JAX value, which lowers to its arrays.

A QArray is a pytree: to JAX it is several arrays, and a gradient with respect to it is a gradient
with respect to its scales. A hi value is one array to JAX, whose tangents are float arrays of the
logical shape and dtype.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import hijax_trace as ht
from quant_numerics.array.operand import dequantize, register_operand
from quant_numerics.array.qarray import QArray
from quant_numerics.array.tiles import RaggedTiles
from quant_numerics.formats.dtypes import FLOAT_DTYPES

_NAMES = ("qvalue", "scale", "zero_point", "global_scale")


def _static_of(q: Any) -> dict[str, Any]:
    """Return the static fields of a QArray or a hi type."""
    return {"qtype": q.qtype, "dtype": q.dtype, "ragged_tiles": q.ragged_tiles}


@dataclasses.dataclass(frozen=True)
class LeadingAxis(ht.MappingSpec):
    """The axis spec that maps a hi value along axis 0.

    Pass it to ``vmap`` in ``in_axes`` and ``out_axes``, with ``axis_size``. ``scan`` uses it
    without being told, and needs ``length``.
    """


@dataclasses.dataclass(frozen=True)
class QArrayTy(ht.HiType):
    """The JAX type of a quantized array that is one value.

    Attributes:
      qvalue: type of the quantized values.
      scale: type of the scales.
      zero_point: type of the zero points, or None.
      global_scale: type of the global scale, or None.
      qtype: name of the quantized type.
      dtype: logical dtype.
      ragged_tiles: as in ``QArray``.
    """

    qvalue: Any
    scale: Any
    zero_point: Any
    global_scale: Any
    qtype: str
    dtype: np.dtype
    ragged_tiles: RaggedTiles = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the array that a value stands for."""
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    def str_short(self, short_dtypes: bool = False, **_: Any) -> str:
        shape = ",".join(map(str, self.shape))
        return f"QArray:{self.qtype}:{self.dtype.name}[{shape}]"

    __str__ = __repr__ = str_short  # type: ignore[assignment]

    def lo_ty(self) -> list[Any]:
        return [ty for ty in map(self.__getattribute__, _NAMES) if ty is not None]

    def lower_val(self, hi_val: HiQArray, /) -> list[Any]:
        return [x for x in map(hi_val.__getattribute__, _NAMES) if x is not None]

    def raise_val(self, *lo_vals: Any) -> HiQArray:
        return HiQArray(*self._filled(lo_vals), **_static_of(self))

    def _filled(self, values: Any) -> list[Any]:
        """Return one value per field, None for a field without an array."""
        rest = iter(values)
        return [None if getattr(self, name) is None else next(rest) for name in _NAMES]

    def _each(self, function: Any) -> QArrayTy:
        parts = {name: getattr(self, name) for name in _NAMES}
        new = {name: None if ty is None else function(ty) for name, ty in parts.items()}
        return dataclasses.replace(self, **new)

    def to_tangent_aval(self) -> Any:
        return self.qvalue.update(dtype=self.dtype, weak_type=False)

    def dec_rank(self, size: int | None, spec: Any) -> QArrayTy:
        for name in ("scale", "zero_point", "global_scale"):
            ty = getattr(self, name)
            if ty is not None and ty.shape[:1] != self.shape[:1]:
                raise ValueError(
                    "axis 0 of a QArray must be a channel axis where vmap and scan map it, got "
                    f"{name} of shape {ty.shape} for shape {self.shape}. Quantize with "
                    "channel_axes=(0, ...), or example by example under vmap."
                )
        return self._each(lambda ty: ty.dec_rank(size, 0))

    def inc_rank(self, size: int | None, spec: Any) -> QArrayTy:
        return self._each(lambda ty: ty.inc_rank(size, 0))

    def leading_axis_spec(self) -> LeadingAxis:
        return LeadingAxis()


@dataclasses.dataclass(frozen=True, eq=False)
class HiQArray:
    """A value of a ``QArrayTy`` outside of transformations.

    It has the attributes of a ``QArray``, but is not a pytree: ``as_lo`` returns its arrays.
    """

    qvalue: Any
    scale: Any
    zero_point: Any
    global_scale: Any
    qtype: str
    dtype: np.dtype
    ragged_tiles: RaggedTiles = ()

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the array that this stands for."""
        return self.qvalue.shape

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return self.qvalue.ndim


def _type_of(q: Any) -> QArrayTy:
    leaves = {name: getattr(q, name) for name in _NAMES}
    parts: dict[str, Any] = {n: None if x is None else jax.typeof(x) for n, x in leaves.items()}
    return QArrayTy(**parts, **_static_of(q))


ht.register_hitype(HiQArray, _type_of)


def as_hi(q: QArray) -> Any:
    """Return a QArray as one JAX value, of type ``QArrayTy``.

    It passes through jit, grad, jvp, vmap (with ``LeadingAxis()`` in in_axes and out_axes), scan,
    remat, cond and while as one value; ops and ``dequantize`` take it. Its tangents and cotangents
    are float arrays of the logical shape and dtype. A tangent of the scales of `q` becomes the
    tangent that it causes in the dequantized array.

    ``shard_map`` does not take hi values as arguments or results (NotImplementedError): pass the
    QArray, and call ``as_hi`` inside.

    Args:
      q: any QArray.
    """
    leaves = [x for x in map(q.__getattribute__, _NAMES) if x is not None]
    return _AsHi(_type_of(q))(*leaves)


def as_lo(h: Any) -> QArray:
    """Return the QArray of a hi value, without a derivative.

    ``from_hi`` has a derivative.

    Args:
      h: a value of type ``QArrayTy``.
    """
    leaves = _AsLo(jax.typeof(h))(h)
    ty = jax.typeof(h)
    return QArray(*ty._filled(leaves), **_static_of(ty))


def from_hi(h: Any) -> jax.Array:
    """Dequantize a hi value, straight through in derivatives.

    Args:
      h: a value of type ``QArrayTy``.

    Returns:
      An array of the logical shape and dtype. Its derivative with respect to `h` is the identity.
    """
    return _FromHi(jax.typeof(h))(h)


class _AsHi(ht.HiPrim):
    def __init__(self, ty: QArrayTy):
        self.in_avals = tuple(ty.lo_ty())
        self.out_aval = ty
        self.params = {"ty": ty}
        super().__init__()

    def expand(self, *leaves: Any) -> HiQArray:
        return self.out_aval.raise_val(*leaves)

    def _restored(self, leaves: Any) -> Any:
        """Return dequantization as a function of float leaves, and their indices."""
        ty = self.out_aval
        floats = [i for i, x in enumerate(self.in_avals) if x.dtype in FLOAT_DTYPES]

        def restore(*values: Any) -> jax.Array:
            parts = list(leaves)
            for i, value in zip(floats, values, strict=True):
                parts[i] = value
            return dequantize(QArray(*ty._filled(parts), **_static_of(ty)))

        return restore, floats

    def jvp(self, primals: Any, tangents: Any) -> Any:
        restore, floats = self._restored(primals)
        # A tangent without a dtype is a symbolic zero.
        dots = [
            tangents[i] if hasattr(tangents[i], "dtype") else jnp.zeros_like(primals[i])
            for i in floats
        ]
        _, tangent = jax.jvp(restore, tuple(primals[i] for i in floats), tuple(dots))
        return _AsHi(self.out_aval)(*primals), tangent

    lin, linearized = ht.linearize_from_jvp

    def vjp_fwd(self, nzs_in: Any, *leaves: Any) -> Any:
        return _AsHi(self.out_aval)(*leaves), leaves

    def vjp_bwd_retval(self, leaves: Any, cotangent: Any) -> Any:
        restore, floats = self._restored(leaves)
        _, pull = jax.vjp(restore, *(leaves[i] for i in floats))
        found = dict(zip(floats, pull(cotangent), strict=True))
        return tuple(found.get(i, _no_tangent(x)) for i, x in enumerate(self.in_avals))

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        moved = ht.bdims_at_front(axis_data, tuple(args), tuple(dims))
        parts = zip(_NAMES, self.out_aval._filled([jax.typeof(x) for x in moved]), strict=True)
        return _AsHi(dataclasses.replace(self.out_aval, **dict(parts)))(*moved), LeadingAxis()


class _AsLo(ht.HiPrim):
    def __init__(self, ty: QArrayTy):
        self.in_avals = (ty,)
        self.out_aval = tuple(ty.lo_ty())
        self.params = {}
        super().__init__()

    def expand(self, h: HiQArray) -> Any:
        return tuple(self.in_avals[0].lower_val(h))

    def jvp(self, primals: Any, tangents: Any) -> Any:
        return _AsLo(*self.in_avals)(*primals), tuple(map(_no_tangent, self.out_aval))

    lin, linearized = ht.linearize_from_jvp

    def vjp_fwd(self, nzs_in: Any, h: Any) -> Any:
        return _AsLo(*self.in_avals)(h), None

    def vjp_bwd_retval(self, residuals: Any, cotangents: Any) -> Any:
        ty = self.in_avals[0].to_tangent_aval()
        return (jnp.zeros(ty.shape, ty.dtype),)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        return _AsLo(jax.typeof(*args))(*args), (0,) * len(self.out_aval)


class _FromHi(ht.HiPrim):
    def __init__(self, ty: QArrayTy):
        self.in_avals = (ty,)
        self.out_aval = ty.to_tangent_aval()
        self.params = {}
        super().__init__()

    def expand(self, h: HiQArray) -> jax.Array:
        ty = self.in_avals[0]
        leaves = ty._filled(ty.lower_val(h))
        return dequantize(QArray(*leaves, **_static_of(ty)))

    def jvp(self, primals: Any, tangents: Any) -> Any:
        return _FromHi(*self.in_avals)(*primals), tangents[0]

    lin, linearized = ht.linearize_from_jvp

    def vjp_fwd(self, nzs_in: Any, h: Any) -> Any:
        return _FromHi(*self.in_avals)(h), None

    def vjp_bwd_retval(self, residuals: Any, cotangent: Any) -> Any:
        return (cotangent,)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        return _FromHi(jax.typeof(*args))(*args), 0


def _no_tangent(aval: Any) -> Any:
    """Return the zero tangent of a type."""
    ty = aval.to_tangent_aval()
    if ty.dtype == jax.dtypes.float0:
        return np.zeros(ty.shape, ty.dtype)
    return jnp.zeros(ty.shape, ty.dtype)


register_operand(HiQArray, as_lo, from_hi)
register_operand(QArrayTy, as_lo, from_hi)
