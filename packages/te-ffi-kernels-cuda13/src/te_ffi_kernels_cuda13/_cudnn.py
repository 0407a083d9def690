"""cuDNN, from where JAX's CUDA plugin has it: the package nvidia-cudnn-cu13, or else the system."""

from __future__ import annotations

import functools

from . import _library
from ._status import native

_PACKAGE, _NAME = "nvidia.cudnn", "libcudnn.so.9"
LEAST = 91600
"""Older ones leave log-sum-exps of padding as they come, or copy from the host for gradients."""


@functools.cache
def loaded() -> tuple[int, str]:
    """Load cuDNN. Returns its version, as 91600 for 9.16.0, or 0 and what went wrong."""
    return _library.load(native().load_cudnn, _PACKAGE, _NAME)


def missing() -> str | None:
    """Why cuDNN can't be used; None where it can."""
    version, error = loaded()
    if not version:
        return f"cuDNN can't be loaded; install nvidia-cudnn-cu13 ({error})"
    if version < LEAST:
        return f"cuDNN is {dotted(version)}, and attention needs {dotted(LEAST)}: upgrade it"
    return None


def dotted(version: int) -> str:
    """91600 as 9.16.0."""
    return f"{version // 10000}.{version % 10000 // 100}.{version % 100}"
