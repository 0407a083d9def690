"""Candidates: what computes an operation on each platform, asked of the installed kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from interception_core import kernel_platforms, platform_of, select_kernel


class Choice(NamedTuple):
    """What computes an operation on a platform: the FFI target, or None and why XLA does."""

    kernel: str | None
    reason: str | None


def platforms(first: str | None = None) -> tuple[str, ...]:
    """Return the platforms that kernels are chosen for.

    Args:
        first: where the parameters are; None for where JAX puts new arrays.
    """
    first = platform_of() if first is None else first
    return (first, *(name for name in kernel_platforms() if name != first))


def choice(op: str, platform: str, operands: Sequence[Any], **question: Any) -> Choice:
    """Return the kernel for a call on a platform, or why there is none.

    Args:
        op: the op.
        platform: where the program is to run.
        operands: arrays or their types.
        **question: what kernels are asked about beside these.
    """
    spec, why = select_kernel(op, platform, operands, **question)
    return Choice(None, why) if spec is None else Choice(spec.target, None)


def choices(op: str, operands: Sequence[Any]) -> dict[str, Choice]:
    """Return the kernel for a call on each platform, or why there is none."""
    return {platform: choice(op, platform, operands) for platform in platforms()}


def shown(kernels: Mapping[str, Choice]) -> str:
    """Return what computes an operation, in a few words."""
    by_target: dict[str, list[str]] = {}
    for platform, (kernel, _) in kernels.items():
        by_target.setdefault(kernel or "XLA", []).append(platform)
    if len(kernels) == 1:
        return next(iter(by_target))
    return ", ".join(f"{target} ({', '.join(names)})" for target, names in by_target.items())
