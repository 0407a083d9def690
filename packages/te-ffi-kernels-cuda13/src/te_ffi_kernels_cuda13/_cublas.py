"""cuBLASLt, from where JAX's CUDA plugin has it: the package nvidia-cublas, or else the system."""

from __future__ import annotations

import functools

from . import _library
from ._status import native

_PACKAGE, _NAME = "nvidia.cu13", "libcublasLt.so.13"


@functools.cache
def loaded() -> tuple[int, str]:
    """Load cuBLASLt. Returns its version, as 130100 for 13.1.0, or 0 and what went wrong."""
    return _library.load(native().load_cublaslt, _PACKAGE, _NAME)


def missing() -> str | None:
    """Why cuBLASLt can't be used; None where it can."""
    version, error = loaded()
    return None if version else f"cuBLASLt can't be loaded; install nvidia-cublas ({error})"
