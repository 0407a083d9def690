"""Two hi types: a quantized matrix and a tuple."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.core import ShapedArray
from jax.sharding import PartitionSpec as P

import hijax_trace as ht

F32, INT8 = jnp.dtype("float32"), jnp.dtype("int8")


def f32(*shape):
    return ShapedArray(shape, F32)


@dataclass(frozen=True)
class Rows(ht.MappingSpec):
    """The only way to map a Quant: over its leading axis."""


@dataclass(frozen=True)
class RowsP(ht.HiPspec):
    """The spec of a Quant split by rows over a mesh axis."""

    axis: Any

    def to_lo(self):
        return (P(self.axis), P(self.axis))

    def to_tangent_spec(self):
        return P(self.axis)

    to_ct_spec = to_tangent_spec


@dataclass(frozen=True)
class Quant:
    """int8[..., k] and a scale per row, f32[...]."""

    values: Any
    scale: Any


@dataclass(frozen=True)
class QuantTy(ht.HiType):
    values: Any
    scale: Any

    @classmethod
    def of(cls, shape):
        return cls(ShapedArray(tuple(shape), INT8), f32(*shape[:-1]))

    shape = property(lambda self: self.values.shape)

    def str_short(self, short_dtypes=False, **_):
        return f"Quant[{','.join(map(str, self.shape))}]"

    def lo_ty(self):
        return [self.values, self.scale]

    def lower_val(self, hi_val):
        return [hi_val.values, hi_val.scale]

    def raise_val(self, values, scale):
        return Quant(values, scale)

    def to_tangent_aval(self):
        return self.values.update(dtype=F32)

    def dec_rank(self, size, spec):
        return QuantTy(self.values.dec_rank(size, 0), self.scale.dec_rank(size, 0))

    def inc_rank(self, size, spec):
        return QuantTy(self.values.inc_rank(size, 0), self.scale.inc_rank(size, 0))

    def leading_axis_spec(self):
        return Rows()

    def shard(self, mesh, manual_axes, check_vma, spec):
        lo = zip(self.lo_ty(), spec.to_lo(), strict=True)
        return QuantTy(*(ty.shard(mesh, manual_axes, check_vma, p) for ty, p in lo))

    def unshard(self, mesh, check_vma, spec):
        lo = zip(self.lo_ty(), spec.to_lo(), strict=True)
        return QuantTy(*(ty.unshard(mesh, check_vma, p) for ty, p in lo))

    def nospec(self, mesh, check_vma, all_names):
        return RowsP(all_names)


ht.register_hitype(Quant, lambda q: QuantTy(jax.typeof(q.values), jax.typeof(q.scale)))


class Quantize(ht.HiPrim):
    def __init__(self, aval):
        self.in_avals = (aval,)
        self.out_aval = QuantTy(aval.update(dtype=INT8), _reduced(aval))
        self.params = {}
        super().__init__()

    def expand(self, x):
        scale = jnp.abs(x).max(-1) / 127
        return Quant(jnp.round(x / scale[..., None]).astype(INT8), scale)

    def jvp(self, primals, tangents):
        return quantize(*primals), tangents[0]  # straight-through

    lin, linearized = ht.linearize_from_jvp

    def vjp_fwd(self, nzs_in, x):
        return quantize(x), None

    def vjp_bwd_retval(self, residuals, cotangent):
        return (cotangent,)

    def batch(self, axis_data, args, dims):
        (x,), (dim,) = args, dims
        return quantize(jnp.moveaxis(x, dim, 0)), Rows()


class Dequantize(ht.HiPrim):
    def __init__(self, aval):
        self.in_avals = (aval,)
        self.out_aval = aval.values.update(dtype=F32)
        self.params = {}
        super().__init__()

    def expand(self, q):
        return q.values.astype(F32) * q.scale[..., None]

    def jvp(self, primals, tangents):
        return dequantize(*primals), tangents[0]

    lin, linearized = ht.linearize_from_jvp

    def vjp_fwd(self, nzs_in, q):
        return dequantize(q), None

    def vjp_bwd_retval(self, residuals, cotangent):
        return (cotangent,)

    def batch(self, axis_data, args, dims):
        return dequantize(*args), 0


def _reduced(aval):
    spec = P(*aval.sharding.spec[:-1])
    return aval.update(shape=aval.shape[:-1], sharding=aval.sharding.update(spec=spec))


def quantize(x):
    return Quantize(jax.typeof(x))(x)


def dequantize(q):
    return Dequantize(jax.typeof(q))(q)


@dataclass(frozen=True)
class Tup:
    elements: tuple


@dataclass(frozen=True)
class TupSpec(ht.MappingSpec):
    dims: tuple


@dataclass(frozen=True)
class TupP(ht.HiPspec):
    specs: tuple

    def to_lo(self):
        return self.specs

    def to_tangent_spec(self):
        return self

    def to_ct_spec(self):
        return self


@dataclass(frozen=True)
class TupTy(ht.HiType):
    types: tuple

    def str_short(self, short_dtypes=False, **_):
        return f"Tup({', '.join(ty.str_short(short_dtypes) for ty in self.types)})"

    def normalize(self):
        return TupTy(tuple(ty.normalize() for ty in self.types))

    def lo_ty(self):
        return [lo for ty in self.types for lo in ty.lo_ty()]

    def lower_val(self, hi_val):
        pairs = zip(self.types, hi_val.elements, strict=True)
        return [lo for ty, x in pairs for lo in ty.lower_val(x)]

    def raise_val(self, *lo_vals):
        rest = list(lo_vals)
        elements = []
        for ty in self.types:
            n = len(ty.lo_ty())
            elements.append(ty.raise_val(*rest[:n]))
            del rest[:n]
        return Tup(tuple(elements))

    def to_tangent_aval(self):
        return TupTy(tuple(ty.to_tangent_aval() for ty in self.types))

    def vspace_zero(self):
        return tup(*(jnp.zeros(ty.shape, ty.dtype) for ty in self.types))

    def vspace_add(self, x, y):
        return tup(*(element(x, i) + element(y, i) for i in range(len(self.types))))

    def dec_rank(self, size, spec):
        pairs = zip(self.types, spec.dims, strict=True)
        return TupTy(tuple(ty if d is None else ty.dec_rank(size, d) for ty, d in pairs))

    def inc_rank(self, size, spec):
        dims = spec.dims if isinstance(spec, TupSpec) else (0,) * len(self.types)
        pairs = zip(self.types, dims, strict=True)
        return TupTy(tuple(ty if d is None else ty.inc_rank(size, d) for ty, d in pairs))

    def leading_axis_spec(self):
        return TupSpec(tuple(ty.leading_axis_spec() for ty in self.types))

    def shard(self, mesh, manual_axes, check_vma, spec):
        pairs = zip(self.types, spec.specs, strict=True)
        return TupTy(tuple(ty.shard(mesh, manual_axes, check_vma, p) for ty, p in pairs))

    def unshard(self, mesh, check_vma, spec):
        pairs = zip(self.types, spec.specs, strict=True)
        return TupTy(tuple(ty.unshard(mesh, check_vma, p) for ty, p in pairs))


ht.register_hitype(Tup, lambda t: TupTy(tuple(map(jax.typeof, t.elements))))


def _instantiate(tangent, aval):
    return jnp.zeros(aval.shape, aval.dtype) if not hasattr(tangent, "dtype") else tangent


class MakeTup(ht.HiPrim):
    def __init__(self, avals):
        self.in_avals = tuple(avals)
        self.out_aval = TupTy(self.in_avals)
        self.params = {}
        super().__init__()

    def expand(self, *elements):
        return Tup(elements)

    def jvp(self, primals, tangents):
        return tup(*primals), tup(*map(_instantiate, tangents, self.in_avals))

    def transpose(self, cotangent, *accums):
        for i, accum in enumerate(accums):
            if hasattr(accum, "accum"):
                accum.accum(element(cotangent, i))

    def vjp_fwd(self, nzs_in, *elements):
        return tup(*elements), None

    def vjp_bwd_retval(self, residuals, cotangent):
        return tuple(element(cotangent, i) for i in range(len(self.in_avals)))

    def batch(self, axis_data, args, dims):
        return tup(*args), TupSpec(tuple(dims))


class Element(ht.HiPrim):
    def __init__(self, aval, index):
        self.in_avals = (aval,)
        self.out_aval = aval.types[index]
        self.params = {"index": index}
        super().__init__()

    def _one_hot(self, cotangent):
        types = self.in_avals[0].types
        zeros = [jnp.zeros(ty.shape, ty.dtype) for ty in types]
        return tup(*(cotangent if i == self.index else z for i, z in enumerate(zeros)))

    def expand(self, t):
        return t.elements[self.index]

    def jvp(self, primals, tangents):
        return element(*primals, self.index), element(*tangents, self.index)

    def transpose(self, cotangent, accum):
        accum.accum(self._one_hot(cotangent))

    def vjp_fwd(self, nzs_in, t):
        return element(t, self.index), None

    def vjp_bwd_retval(self, residuals, cotangent):
        return (self._one_hot(cotangent),)

    def batch(self, axis_data, args, dims):
        return element(*args, self.index), dims[0].dims[self.index]


def tup(*elements):
    return MakeTup(map(jax.typeof, elements))(*elements)


def element(t, index):
    return Element(jax.typeof(t), index)(t)
