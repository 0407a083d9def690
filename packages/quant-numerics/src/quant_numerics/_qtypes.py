"""The number formats: quantized types, and the float types they stand for."""

import dataclasses
import difflib
import types
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class QType:
    """A symmetric integer format.

    Codes lie in ``[-qmax, qmax]`` (narrow range: the most negative two's complement code is not
    used, so negation is exact and zero is code 0), as in section 3.1 of Wu et al. 2020,
    "Integer Quantization for Deep Learning Inference" (arXiv:2004.09602).

    Attributes:
      name: the name that ``quantize`` and ``QArray.qtype`` use.
      bits: bits of one code.
      qmax: the largest code.
      storage_dtype: dtype of ``QArray.qvalue``.
    """

    name: str
    bits: int
    qmax: int
    storage_dtype: np.dtype


QTYPES: Mapping[str, QType] = types.MappingProxyType(
    {
        "int8": QType("int8", 8, 127, jnp.dtype(jnp.int8)),
        "int4": QType("int4", 4, 7, jnp.dtype(jnp.int4)),
    }
)
"""All known quantized types by name (read-only)."""

FLOAT_DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)))
"""The dtypes that can be quantized, and that results can have."""


def get_qtype(name: str) -> QType:
    """Returns the QType called `name`.

    Raises:
      ValueError: `name` is not in ``QTYPES``; the message lists the known names and the nearest.
    """
    try:
        return QTYPES[name]
    except (KeyError, TypeError):
        nearest = difflib.get_close_matches(str(name), QTYPES, n=1, cutoff=0.0)[0]
        raise ValueError(
            f"unknown qtype {name!r}: known qtypes are {', '.join(sorted(QTYPES))}; "
            f"did you mean {nearest!r}?"
        ) from None


def float_dtype(dtype: Any, what: str) -> np.dtype:
    """`dtype` as a canonical (x64-aware) supported float dtype; a TypeError names `what` if not."""
    if jnp.dtype(dtype) not in FLOAT_DTYPES:
        allowed = ", ".join(d.name for d in FLOAT_DTYPES)
        raise TypeError(
            f"{what} must have one of the dtypes {allowed}, got {jnp.dtype(dtype).name}; "
            "convert it with .astype(...) first"
        )
    return jax.dtypes.canonicalize_dtype(dtype)


def promote_floats(a: np.dtype, b: np.dtype) -> np.dtype:
    """The wider of two float dtypes; float32 for bfloat16 with float16.

    JAX's own lattice for these dtypes, spelled out because ``jnp.promote_types`` refuses any
    promotion under ``jax.numpy_dtype_promotion("strict")``.
    """
    if a == b:
        return a
    if a.itemsize == b.itemsize:
        return jnp.dtype(jnp.float32)
    return max(a, b, key=lambda d: d.itemsize)


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """The dtype that scales, accumulators and rescaling use for logical dtype `dtype`."""
    return promote_floats(dtype, jnp.dtype(jnp.float32))
