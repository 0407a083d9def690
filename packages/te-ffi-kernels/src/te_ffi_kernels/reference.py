"""Every op in plain JAX, by its name.

``reference.softmax(x)`` is ``te_ffi_kernels.softmax(x)`` inside ``reference_ops``. References run
on platforms without a kernel, and kernels are compared with them.
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
