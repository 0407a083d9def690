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
from quant_numerics.array.qarray import QArray, dequantize, register_operand
from quant_numerics.formats.qtypes import FLOAT_DTYPES


@dataclasses.dataclass(frozen=True)
class LeadingAxis(ht.MappingSpec):
    """The axis spec that maps a hi value along axis 0.

    Pass it to ``vmap`` in ``in_axes`` and ``out_axes``, with ``axis_size``. ``scan`` uses it
    without being told, and needs ``length``.
    """


class _OfQArray:
    """What a hi value and its type have of the QArray of arrays, or of types."""

    lo: QArray

    @property
    def shape(self) -> tuple[int, ...]:
        """Return the shape of the array that it stands for."""
        return self.lo.shape

    @property
    def ndim(self) -> int:
        """Return the number of axes."""
        return len(self.shape)

    @property
    def dtype(self) -> np.dtype:
        """Return the logical dtype."""
        return self.lo.dtype

    @property
    def qtype(self) -> str:
        """Return the name of the quantized type."""
        return self.lo.qtype


@dataclasses.dataclass(frozen=True)
class QArrayTy(_OfQArray, ht.HiType):
    """The JAX type of a quantized array that is one value.

    Attributes:
      types: types of the QArray's arrays, which it is lowered to.
      tree: the QArray's tree. It compares and hashes the static fields, too.
    """

    types: tuple[Any, ...]
    tree: Any

    @classmethod
    def of(cls, q: QArray) -> QArrayTy:
        """Return the type of a QArray as one value."""
        leaves, tree = jax.tree.flatten(q)
        return cls(tuple(map(jax.typeof, leaves)), tree)

    @property
    # pyrefly: ignore [bad-override]
    def lo(self) -> QArray:
        """Return the QArray of types that it is lowered to."""
        return jax.tree.unflatten(self.tree, self.types)

    def str_short(self, short_dtypes: bool = False, **_: Any) -> str:
        shape = ",".join(map(str, self.shape))
        return f"QArray:{self.qtype}:{self.dtype.name}[{shape}]"

    __str__ = __repr__ = str_short  # type: ignore[assignment]

    def lo_ty(self) -> list[Any]:
        return list(self.types)

    def lower_val(self, hi_val: HiQArray, /) -> list[Any]:
        return jax.tree.leaves(hi_val.lo)

    def raise_val(self, *lo_vals: Any) -> HiQArray:
        return HiQArray(jax.tree.unflatten(self.tree, lo_vals))

    def _each(self, function: Any) -> QArrayTy:
        return dataclasses.replace(self, types=tuple(map(function, self.types)))

    def to_tangent_aval(self) -> Any:
        return self.types[0].update(dtype=self.dtype, weak_type=False)  # that of the values

    def dec_rank(self, size: int | None, spec: Any) -> QArrayTy:
        for path, ty in jax.tree_util.tree_flatten_with_path(self.lo)[0]:
            if ty.shape[:1] != self.shape[:1]:
                raise ValueError(
                    "axis 0 of a QArray must be a channel axis where vmap and scan map it, got "
                    f"{jax.tree_util.keystr(path, simple=True)} of shape {ty.shape} for shape "
                    f"{self.shape}. Quantize with channel_axes=(0, ...), or example by example "
                    "under vmap."
                )
        return self._each(lambda ty: ty.dec_rank(size, 0))

    def inc_rank(self, size: int | None, spec: Any) -> QArrayTy:
        return self._each(lambda ty: ty.inc_rank(size, 0))

    def leading_axis_spec(self) -> LeadingAxis:
        return LeadingAxis()


@dataclasses.dataclass(frozen=True, eq=False)
class HiQArray(_OfQArray):
    """A value of a ``QArrayTy`` outside of transformations.

    It is not a pytree: ``as_lo`` returns its arrays.
    """

    # pyrefly: ignore [bad-override]
    lo: QArray


ht.register_hitype(HiQArray, lambda h: QArrayTy.of(h.lo))


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
    return _AsHi(QArrayTy.of(q))(*jax.tree.leaves(q))


def as_lo(h: Any) -> QArray:
    """Return the QArray of a hi value, without a derivative.

    ``from_hi`` has a derivative.

    Args:
      h: a value of type ``QArrayTy``.
    """
    ty = jax.typeof(h)
    return jax.tree.unflatten(ty.tree, _AsLo(ty)(h))


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
            return dequantize(jax.tree.unflatten(ty.tree, parts))

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
        types = tuple(map(jax.typeof, moved))
        return _AsHi(dataclasses.replace(self.out_aval, types=types))(*moved), LeadingAxis()


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
        return dequantize(h.lo)

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
