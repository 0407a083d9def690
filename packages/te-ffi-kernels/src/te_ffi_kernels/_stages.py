"""The stages of FFI targets, and how often they were warmed up."""

from __future__ import annotations

import dataclasses

from interception_core import FfiTarget

from . import _native


@dataclasses.dataclass(frozen=True)
class Stages:
    """The stages of an FFI target.

    Attributes:
        target: its name.
        names: the stages that it has: "instantiate" (on CPU, once per call site and loaded
            executable; kernels are warmed up there) and "execute" (each call). XLA calls
            "prepare" and "initialize" on GPUs only.
    """

    target: str
    names: tuple[str, ...]


def stages(target: str) -> Stages:
    """Return the stages of a target of this package.

    Args:
        target: such as ``"te_ffi_kernels.gemm_w8a8"``; the part before the dot may be left out.

    Raises:
        ValueError: there is no such target.
    """
    table = _native.targets()
    name = target if "." in target else f"te_ffi_kernels.{target}"
    if name not in table:
        raise ValueError(f"There is no target {target!r}; there are: {', '.join(sorted(table))}")
    return Stages(name, tuple(sorted(table[name])))


def registrations() -> dict[str, FfiTarget]:
    """Return every target with its stages, for the registry of interception-core."""
    return {
        name: FfiTarget(stages=stages, api_version=_native.API_VERSION)
        for name, stages in _native.targets().items()
    }


def targets() -> tuple[str, ...]:
    """Return the names of all targets of this package."""
    return tuple(sorted(_native.targets()))


def warm_counts() -> dict[str, int]:
    """Return how often each target was warmed up, by name."""
    return dict(_native.warm_counts())


def isa() -> str:
    """Return the instruction set in use: the best here, or ``JAXTAP_ISA``.

    Raises:
        RuntimeError: ``JAXTAP_ISA`` names one that is unknown or that this machine hasn't; the
            message lists those that it has.
    """
    return _native.isa()


def isas() -> tuple[str, ...]:
    """Return the instruction sets with kernels on this machine, best last."""
    return tuple(_native.isas())
