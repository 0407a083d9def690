"""Platforms: where kernels run, by the names that programs are lowered for."""

from __future__ import annotations

from typing import Any

from ..plugins.host import declared_specs, loaded
from ..plugins.specs import KernelSpec

_GPUS = ("cuda", "rocm")
"""The platforms that JAX's devices call "gpu"."""
_KITS = {"cpu": "te-ffi-kernels", "cuda": "te-ffi-kernels-cuda13"}
"""The distributions of jaxtap that have kernels, by platform."""


def kernel_platforms() -> tuple[str, ...]:
    """Return the platforms that there are kernels for, sorted."""
    return tuple(sorted({spec.platform for spec in declared_specs(KernelSpec)}))


def missing_kernels(platform: str) -> str | None:
    """Return what to do where no plugin has kernels for a platform; None where one has."""
    if platform in kernel_platforms():
        return None
    kit = _KITS.get(platform)
    hint = "" if kit is None else f": install {kit}"
    # One of these may have them.
    left = loaded().left_out.rstrip(".")
    return f"no kernel for {platform} is installed{hint}" + (f" ({left})" if left else "")


def platform_of(where: Any = None) -> str:
    """Return the platform that programs are lowered for, as `KernelSpec.platform` spells it.

    Args:
        where: a device, an array, or the name of a platform, such as JAX's ``"gpu"``. For other
            values it is the device that JAX puts new arrays on.
    """
    import jax

    if isinstance(where, jax.core.Tracer) or not hasattr(where, "devices"):
        device = where if isinstance(where, str | jax.Device) else None
    else:
        device = next(iter(where.devices()), None)
    if device is None:
        device = jax.config.jax_default_device or jax.devices()[0]  # type: ignore[attr-defined]
    name = device if isinstance(device, str) else device.platform
    if name != "gpu":
        return name
    for found in _GPUS:
        try:
            gpus = jax.devices(found)
        except RuntimeError:
            continue
        if device == "gpu" or device in gpus:
            return found
    return next((name for name in _GPUS if name in kernel_platforms()), _GPUS[0])
