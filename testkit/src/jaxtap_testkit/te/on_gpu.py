"""On GPU: whether there is a GPU, and which tests run there.

The tests of the ops are those of the CPU, whose functions the modules beside this take: on a
machine with a GPU it is where JAX puts arrays.
"""

import jax
import pytest

import te_ffi_kernels_cuda13


def why_not():
    """Why nothing can run on a GPU here; None where it can."""
    try:
        if jax.default_backend() in ("gpu", "cuda"):
            status = te_ffi_kernels_cuda13.status()
            return status if status.startswith("no kernels") else None
    except RuntimeError as error:
        return f"JAX finds no GPU: {error}".splitlines()[0]
    return f"JAX finds no GPU here: it runs on {jax.default_backend()}"


_reason = why_not()
marks = [pytest.mark.gpu, pytest.mark.skipif(_reason is not None, reason=_reason or "")]
