"""AffineWeight: a stored parameter with a float minimum per group."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

import quant_numerics as qn
from hijax_trace import Move, MoveError, Part
from interception_core import get_form
from provider_xla.features import AroundStored
from quant_numerics import Contraction, Matmul, RaggedMatmul


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, eq=False)
class AffineWeight(AroundStored):
    """A quantized parameter for ``(value + shift) * scale + minimum``.

    GGUF's formats with a minimum (Q4_1, Q4_K, ...) are stored so. A contraction with it is the sum
    of two: one with ``inner``, by a kernel if there is one, and one of the activation's sums over
    each group with a number for that group. A pytree of its arrays.

    Attributes:
        inner: quantized values and scales without zero points: a QArray, PackedQArray or
            PrepackedWeight.
        minimum: float array of the shape of the scales.
        shift: what is added to each quantized value: GGUF's numbers have no sign, and are stored
            here less ``shift`` (static).
    """

    kind: ClassVar[str] = "affine"

    minimum: jax.Array
    shift: int = dataclasses.field(metadata={"static": True})

    @property
    def nbytes(self) -> int:
        """Return the bytes of all its arrays."""
        return self.inner.nbytes + self.minimum.size * self.minimum.dtype.itemsize

    def restore(self) -> jax.Array:
        """Return the parameter, dequantized."""
        return _restored(self)

    def parts(self) -> dict[str, Part]:
        """Return quantized values with their scales, and the minima."""
        return {"inner": Part(self.inner), "minimum": Part(self.minimum)}

    def move(self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]) -> Move:
        """Return a primitive as a move of these; see ``ArrayProxy.move``."""
        if primitive in ("pad", "select_n"):
            raise MoveError(f"{primitive} of quantized values with a minimum")
        return super().move(primitive, params, operands)

    def moved(
        self, primitive: str, params: Mapping[str, Any], operands: Sequence[Any]
    ) -> Sequence[Any]:
        """Return a primitive's move of it; looked-up rows are unpacked."""
        if primitive == "gather" and not isinstance(self.inner, qn.QArray):
            held = self.unpacked()
            return held.moved(primitive, params, [held if x is self else x for x in operands])
        return super().moved(primitive, params, operands)

    def astype(self, dtype: Any) -> AffineWeight:
        """Return it for a parameter of another float dtype."""
        return dataclasses.replace(self, inner=self.inner.astype(dtype))

    def portable(self, scale_shape: Sequence[int] | None = None) -> AffineWeight:
        """Return it in no kernel's layout, with scales where the minima are."""
        return super().portable(self.minimum.shape if scale_shape is None else scale_shape)

    def takes(self, contraction: qn.Contraction, side: int, x_shape: Sequence[int] | None) -> bool:
        """Return whether it can be an operand: a contraction with a minimum is one of sums."""
        # Groups of rows have sums of columns, groups of columns would not.
        is_grouped = isinstance(contraction, RaggedMatmul) and contraction.trains
        takes = is_grouped or isinstance(contraction, Matmul)
        return takes and super().takes(contraction, side, x_shape)

    def reduced(
        self, contraction: Contraction, side: int, x: Any, extras: Sequence[Any]
    ) -> tuple[Any, Any, jax.Array | None]:
        """Return ``inner``, and what its contraction lacks without minimum and shift, in float32.

        See ``StoredForm``.
        """
        assert isinstance(contraction, Matmul | RaggedMatmul)
        w_axes = contraction.shared(side, self.ndim)
        x_axes = contraction.shared(1 - side, x.ndim)
        scale = _scale_of(self.inner, self.minimum.shape)
        lacks = self.minimum.astype(jnp.float32) + scale.astype(jnp.float32) * self.shift
        for axis, size in enumerate(self.shape):
            if axis not in w_axes and lacks.shape[axis] != size:
                lacks = jnp.repeat(lacks, size // lacks.shape[axis], axis)
        # Elements of a group have one minimum, so only the sum of their activations matters.
        sums = x.astype(jnp.float32)
        for axis, x_axis in zip(w_axes, x_axes, strict=True):
            shape = (*sums.shape[:x_axis], lacks.shape[axis], -1, *sums.shape[x_axis + 1 :])
            sums = sums.reshape(shape).sum(x_axis + 1)
        wide = dataclasses.replace(contraction, preferred_element_type=jnp.dtype(jnp.float32))
        operands = (lacks, sums) if side == 0 else (sums, lacks)
        return self.inner, x, wide.run(*operands, *extras)

    def to_parts(self, scale_shape: Sequence[int] | None = None) -> qn.Parts:
        """Return the parts of ``inner``, and the minima; see ``StoredForm``."""
        inner = self.inner.to_parts(self.minimum.shape if scale_shape is None else scale_shape)
        return inner.around(self.kind, {"shift": self.shift}, {"minimum": self.minimum})

    def arrays(self) -> dict[str, Any]:
        """Return the arrays of ``inner``, and the minima."""
        return {**self.inner.arrays(), "minimum": self.minimum}

    @classmethod
    def from_parts(cls, about: Mapping[str, Any], arrays: Mapping[str, Any]) -> AffineWeight:
        """Return the weight of its parts; see ``StoredForm``."""
        inner = get_form(about["inner"]).from_parts(about, arrays)
        minimum, shift = arrays["minimum"], about["shift"]
        fits = minimum.ndim == inner.ndim and all(
            m and n % m == 0 for n, m in zip(inner.shape, minimum.shape, strict=True)
        )
        if not fits or not jnp.issubdtype(minimum.dtype, jnp.floating):
            raise ValueError(
                f"minima {minimum.dtype}{list(minimum.shape)} don't divide {list(inner.shape)}"
            )
        if type(shift) is not int or abs(shift) > 2**15:
            raise ValueError(f"a shift of {shift!r} is not one of quantized values")
        return cls(inner, minimum, shift)


def with_minimum(q: qn.QArray) -> AffineWeight:
    """Return an array with zero points as one with minima, which kernels take."""
    assert q.zero_point is not None
    points = q.zero_point.astype(jnp.float32)
    inner = dataclasses.replace(q, zero_point=None)
    return AffineWeight(inner, -points * q.scale.astype(jnp.float32), 0)


def _scale_of(inner: Any, shape: Sequence[int]) -> jax.Array:
    return inner.portable(tuple(shape)).scale


# Jitted: a program that doesn't use the result has one equation of it, traced once per shape.
@jax.jit
def _restored(held: AffineWeight) -> jax.Array:
    inner = held.inner.unpacked()

    def spread(array: jax.Array) -> jax.Array:
        for axis, size in enumerate(inner.shape):
            array = jnp.repeat(array, size // max(array.shape[axis], 1), axis)
        return array.astype(jnp.float32)

    values = inner.qvalue.astype(jnp.float32) + held.shift
    return (values * spread(inner.scale) + spread(held.minimum)).astype(held.dtype)


# Programs were exported with it when it was a part of provider-xla.
qn.register_serialization(AffineWeight, name="provider_xla.AffineWeight")
