"""The float dtypes that operands and results may have."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

_F32 = jnp.dtype(jnp.float32)

FLOAT_DTYPES = tuple(map(jnp.dtype, (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)))
"""The dtypes that can be quantized, and that results can have."""


def float_dtype(dtype: Any, what: str) -> np.dtype:
    """Return `dtype` canonical (x64-aware), or raise a TypeError that names `what`."""
    if jnp.dtype(dtype) not in FLOAT_DTYPES:
        allowed = ", ".join(d.name for d in FLOAT_DTYPES)
        raise TypeError(
            f"{what} must have one of the dtypes {allowed}, got {jnp.dtype(dtype).name}. Convert "
            "it with .astype(...) first."
        )
    return jax.dtypes.canonicalize_dtype(dtype)


def promote_floats(a: np.dtype, b: np.dtype) -> np.dtype:
    """Return the wider of two float dtypes, float32 for bfloat16 with float16.

    This is JAX's promotion of these dtypes. It is spelled out because ``jnp.promote_types`` refuses
    to promote under ``jax.numpy_dtype_promotion("strict")``.
    """
    if a == b:
        return a
    if a.itemsize == b.itemsize:
        return _F32
    return max(a, b, key=lambda d: d.itemsize)


def compute_dtype(dtype: np.dtype) -> np.dtype:
    """Return the dtype that arithmetic on scales uses for a logical dtype."""
    return promote_floats(dtype, _F32)
