"""Which products with packed weights have a kernel, on any machine."""

import jax
import jax.numpy as jnp
import pytest

from interception_core._kernels.call import kernel_call
from te_ffi_kernels_cuda13 import _supports


@pytest.mark.parametrize(
    ("shape", "dtype", "group", "part"),
    [
        ((1, 64), "bfloat16", 0, True),
        ((64, 64), "float32", 32, True),
        ((0, 64), "float16", 8, True),
        ((65, 64), "float32", 0, "x has 65 rows"),
        ((5, 13, 64), "float32", 0, "x has 65 rows"),
        ((1, 64), "int8", 0, "x is int8"),
        ((1, 64), "float32", 12, "groups of 12 rows"),
        ((1, 64), "float32", 24, "groups of 24 rows"),
        ((1, 0), "float32", 0, "nothing is contracted"),
    ],
)
def test_few_rows(shape, dtype, group, part):
    x = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
    weight = jax.ShapeDtypeStruct((shape[-1], 40), jnp.int8)
    call = kernel_call("gemv_w8", "cuda", (x, weight), {"group": group, "bits": 8})
    found = _supports.few_rows(call)
    assert found is True if part is True else part in found
