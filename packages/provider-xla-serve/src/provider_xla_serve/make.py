"""Export: a quantized program, lowered for platforms and shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export

from interception_core import platform_of
from provider_xla import QuantizationError

from .kernels import export_checks
from .program import ExportedProgram


def export(
    applied: Callable[..., Any],
    stored: Any,
    args: Sequence[Any],
    *,
    shapes: Any = None,
    platforms: Sequence[str] | None = None,
    inside: bool = False,
) -> ExportedProgram:
    """Export a function of stored parameters: see ``Plan.export``."""
    program = (lambda *args: applied(stored, *args)) if inside else applied
    program.__name__ = getattr(applied, "__name__", "program")
    taken = tuple(args)
    if shapes is not None:
        # As JAX has them: NumPy's int64 is int32 without x64.
        types = jax.eval_shape(lambda *args: args, *taken)
        taken = jax.export.symbolic_args_specs(types, shapes)
    if platforms is None:
        platforms = (platform_of(jax.tree.leaves(stored)[0]),) if jax.tree.leaves(stored) else None
    make = jax.export.export(jax.jit(program), platforms=platforms, disabled_checks=export_checks())
    try:
        exported = make(*taken) if inside else make(stored, *taken)
    except Exception as error:
        if not any(_is_symbolic(leaf) for leaf in jax.tree.leaves(taken)):
            raise
        raise QuantizationError(
            f"{program.__name__} must hold for every size of its arguments to be exported for "
            f"shapes={shapes!r}, and it doesn't: {type(error).__name__}: {error} Export it for "
            "fixed shapes, once for each that you serve."
        ) from error
    return ExportedProgram.of(exported)


def _is_symbolic(leaf: Any) -> bool:
    return not all(isinstance(size, int) for size in getattr(leaf, "shape", ()))
