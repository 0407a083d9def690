"""Preparing a whole program ahead of its first call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from interception_core import KernelSpec, declared_specs, register_kernel

from .op import has_backend


def warmup(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> jax.stages.Compiled:
    """Compile a program and warm its kernels up, without running it.

    Args:
        fn: a function, jitted or not.
        args: its arguments: arrays, or a ``jax.ShapeDtypeStruct`` for each.
        kwargs: its keyword arguments, the same.

    Returns:
        The compiled program. Call this one: a later call of ``fn`` compiles again, unless ``fn`` is
        jitted or the persistent compilation cache is on, and warms up once more.
    """
    jitted = fn if hasattr(fn, "lower") else jax.jit(fn)
    return jitted.lower(*args, **kwargs).compile()  # pyrefly: ignore[missing-attribute]


def register() -> tuple[str, ...]:
    """Register all kernels of the installed plugins for the platforms at hand.

    Call it before ``jax.export`` reloads a program. A program that is traced in this process
    registers its kernels.

    Returns:
        The names of their targets.

    Raises:
        KernelError: one of them can't be registered.
    """
    # A device calls its platform "gpu"; kernels are for "cuda".
    found = [
        spec
        for spec in declared_specs(KernelSpec)
        if spec.platform == "cpu" or has_backend(spec.platform)
    ]
    return tuple(register_kernel(spec) for spec in found)


def export_checks() -> tuple[jax.export.DisabledSafetyCheck, ...]:
    """Return what ``jax.export.export(..., disabled_checks=...)`` needs for programs with kernels.

    JAX does not promise that a saved program can call custom targets later. The versions of the
    installed plugins decide whether these can.
    """
    from jax.export import DisabledSafetyCheck

    return tuple(
        DisabledSafetyCheck.custom_call(spec.target) for spec in declared_specs(KernelSpec)
    )
