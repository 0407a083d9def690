"""In which dtypes an op of two operands multiplies and sums.

An op asks ``arithmetic(lhs, rhs, precision)``, converts each side with ``numbers``, and multiplies
the result by the effective scales.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from quant_numerics.array.qarray import QArray, qtype_of
from quant_numerics.formats.encoding import decode
from quant_numerics.formats.qtypes import compute_dtype, float_dtype, promote_floats

INT32_MAX = 2**31 - 1
_MIXED = {jnp.dtype(jnp.float8_e4m3fn), jnp.dtype(jnp.float8_e5m2)}
"""Dtypes that a contraction multiplies as they are: those of FP8 training, where activations and
weights have more digits than gradients. XLA passes both to cuBLASLt."""
_LEAST_CHUNK = 64
"""Integer sums of fewer terms than this are not worth the rescaling of each."""


@dataclasses.dataclass(frozen=True)
class Arithmetic:
    """The dtypes in which two operands are multiplied and summed.

    At least one operand is a QArray.

    Attributes:
      dtype: dtype that the numbers of both sides are converted to.
      sums: dtype of the sums, int32 or a float.
      precision: the ``precision`` of the op of ``lax``.
      limit: how many products an int32 sum may have; None for float sums.
      own: the dtypes of lhs and rhs where a contraction can take two; None where it takes `dtype`.
    """

    dtype: np.dtype
    sums: np.dtype
    precision: Any
    limit: int | None = None
    own: tuple[np.dtype, np.dtype] | None = None

    @property
    def sides(self) -> tuple[np.dtype, np.dtype]:
        """Return the dtypes in which ``lax.dot_general`` gets lhs and rhs."""
        return self.own or (self.dtype, self.dtype)


def arithmetic(lhs: QArray | jax.Array, rhs: QArray | jax.Array, precision: Any) -> Arithmetic:
    """Return how to multiply `lhs` and `rhs`, at least one a QArray."""
    quantized = [x for x in (lhs, rhs) if isinstance(x, QArray)]
    floats = [x.dtype for x in (lhs, rhs) if not isinstance(x, QArray)]
    kinds = [qtype_of(q) for q in quantized]
    float32 = jnp.dtype(jnp.float32)
    # int16 and codebooks have more digits than the 16-bit floats.
    fine = any(k.bits > 8 or k.kind == "codebook" for k in kinds)
    if floats:
        if fine and floats[0] != compute_dtype(floats[0]):
            return Arithmetic(float32, float32, precision or lax.Precision.HIGHEST)
        return Arithmetic(floats[0], compute_dtype(floats[0]), precision)
    if all(k.kind == "int" for k in kinds):
        limit = INT32_MAX // (largest_number(quantized[0]) * largest_number(quantized[1]))
        if not fine:
            return Arithmetic(jnp.dtype(jnp.int8), jnp.dtype(jnp.int32), None, limit)
        if limit >= _LEAST_CHUNK:
            return Arithmetic(jnp.dtype(jnp.int32), jnp.dtype(jnp.int32), None, limit)
    if fine:
        return Arithmetic(float32, float32, lax.Precision.HIGHEST)
    left, right = (k.storage_dtype for k in kinds)
    if left == right and kinds[0].kind == "float" and kinds[0].bits == 8:
        return Arithmetic(left, float32, None)
    if {left, right} == _MIXED:
        return Arithmetic(float32, float32, None, own=(left, right))
    # Up to 9 binary digits, which matrix units keep at the default precision. Not bfloat16: XLA's
    # CPU backend can't sum all products of that in float32.
    return Arithmetic(float32, float32, None)


def largest_number(q: QArray) -> int:
    """Return the largest magnitude of a quantized value less the zero point."""
    kind = qtype_of(q)
    if q.zero_point is None:
        # quantize keeps to qmax; other people's files use the whole range.
        return int(kind.qmax) if kind.asymmetric is None else -kind.asymmetric[0]
    assert kind.asymmetric is not None
    return kind.asymmetric[1] - kind.asymmetric[0]


def has_zero_point_left(q: QArray, dtype: np.dtype) -> bool:
    """Return whether ``numbers(q, dtype)`` leaves the zero point to be subtracted."""
    return q.zero_point is not None and dtype == jnp.int8 and largest_number(q) > 127


def numbers(q: QArray, dtype: np.dtype) -> jax.Array:
    """Return the numbers that quantized values stand for, less zero points, exactly.

    The difference of int8 values and zero points does not fit in int8: there the zero
    point is left to the caller, as ``has_zero_point_left`` tells.
    """
    values = decode(q.qvalue, qtype_of(q), dtype)
    if q.zero_point is None or has_zero_point_left(q, dtype):
        return values
    cut = q.slices
    return cut.join(cut.split(values) - cut.split(q.zero_point.astype(dtype)))


def output_dtype(lhs: QArray | jax.Array, rhs: QArray | jax.Array, preferred: Any) -> np.dtype:
    """Return the dtype of an op's result."""
    if preferred is not None:
        return float_dtype(preferred, "preferred_element_type")
    return promote_floats(lhs.dtype, rhs.dtype)
