"""Every op in plain JAX, by its name: what kernels are compared with.

``reference.softmax(x)`` is ``te_ffi_kernels.softmax(x)`` inside of ``reference_ops``. References
are what runs on a platform without a kernel.
"""

from typing import Any

import te_ffi_kernels

from .op import reference_ops


def __getattr__(name: str) -> Any:
    fn = getattr(te_ffi_kernels, name)
    if name.startswith("_") or not callable(fn):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = fn = reference_ops()(fn)
    return fn
