"""What there is of the kernels in this process."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any


def built() -> bool:
    """Return whether this installation has the compiled part."""
    return importlib.util.find_spec(f"{__package__}._native") is not None


def native() -> Any:
    """The compiled part."""
    return importlib.import_module(f"{__package__}._native")


def status() -> str:
    """Tell in a line whether there are kernels here, and what is missing if not.

    Asks the driver for its version; starts nothing on a GPU.
    """
    if not built():
        return (
            "no kernels: this was built without them. Ops run as plain JAX on GPUs. Install "
            "nvcc 13, set JAXTAP_CUDA=ON, and install it again"
        )
    wanted, driver = native().CUDA_VERSION, native().driver_version()
    if driver == 0:
        return f"kernels for CUDA {dotted(wanted)}, and no NVIDIA driver here to run them"
    if driver // 1000 < wanted // 1000:
        return (
            f"kernels for CUDA {dotted(wanted)}, and a driver for {dotted(driver)}, which can't "
            "run them: upgrade the driver"
        )
    return f"kernels for CUDA {dotted(wanted)}, a driver for {dotted(driver)}"


def dotted(version: int) -> str:
    """CUDA's 13020 as 13.2."""
    return f"{version // 1000}.{version % 1000 // 10}"


def warm_counts() -> dict[str, int]:
    """Return how often each target was warmed up in this process: per call site and device."""
    return dict(native().warm_counts()) if built() else {}
