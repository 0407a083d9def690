"""Export: a quantized program, or a model object's method, lowered for platforms and shapes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.export

from interception_core import find_bridge, platform_of
from provider_xla import Bridge, QuantizationError
from provider_xla.features import (
    is_array,
    is_kept,
    path_of,
)

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


def model_parameters(model: Any) -> dict[str, Any]:
    """Return a model's parameters by path, as ``export_model``'s programs take them.

    Args:
        model: what ``quantize_model`` returned.

    Returns:
        A flat dict of arrays, stored parameters and, for each that has an adapter, an
        ``AdaptedWeight``; ``save`` it for the process that serves.

    Raises:
        QuantizationError: the model is not quantized, or holds no parameters.
    """
    found, _ = _flattened(find_bridge(model), model)
    return {name: leaf for name, leaf in found.items() if is_kept(leaf) or is_array(leaf)}


def _flattened(bridge: Bridge, model: Any) -> tuple[dict[str, Any], Any]:
    """Return the leaves of a model's parameters by path, and their tree."""
    if bridge.quantized(model) is None:
        raise QuantizationError(
            f"This {type(model).__name__} is not quantized. Pass what quantize_model returned."
        )
    parameters = bridge.parameters(model)
    if parameters is None:
        raise QuantizationError(
            f"A {type(model).__name__} must hold its variables to be exported, got one that is not "
            "bound. Bind it: net.bind(variables)."
        )
    found, treedef = jax.tree_util.tree_flatten_with_path(parameters, is_leaf=is_kept)
    return {path_of(keys): leaf for keys, leaf in found}, treedef


def export_model(
    model: Any,
    *args: Any,
    method: str | None = None,
    shapes: Any = None,
    platforms: Sequence[str] | None = None,
    inside: bool = False,
) -> ExportedProgram:
    """Export a method of a quantized model object; see ``Plan.export``.

    Args:
        model: what ``quantize_model`` returned.
        args: inputs of the method: arrays or ``jax.ShapeDtypeStruct``.
        method: its name; None for the first that is quantized.
        shapes: symbolic sizes of ``args``, as ``Plan.export`` takes them.
        platforms: the platforms to lower for; None for that of the parameters.
        inside: whether the parameters are constants of the program; otherwise
            ``model_parameters(model)`` is its first argument.

    Returns:
        The program: ``save`` it, and load it by ``load_exported`` in a process without the model.

    Raises:
        QuantizationError: the model is not quantized, holds no parameters, or holds caches that
            its methods change; or the program doesn't hold for every size of symbolic shapes.
    """
    bridge = find_bridge(model)
    leaves, treedef = _flattened(bridge, model)
    quantized = bridge.quantized(model)
    assert quantized is not None
    if bridge.caches(model) is not None:
        raise QuantizationError(
            f"A {type(model).__name__} must hold no caches to be exported, since a program changes "
            "no state. Plan a function that takes the cache and returns it, and export that: "
            "provider.plan(fn, params, ...).export(...)."
        )
    # A flat dict by path: a process that serves can make that without the model's classes.
    run = quantized.apply(bridge.function(model, method or quantized.methods[0]))
    stored = model_parameters(model)

    def program(stored: Any, *args: Any) -> Any:
        # Leaves that are not arrays, such as Equinox activation functions, belong to the program.
        held = [stored.get(name, leaf) for name, leaf in leaves.items()]
        return run(jax.tree.unflatten(treedef, held), *args)

    program.__name__ = type(model).__name__
    return export(program, stored, args, shapes=shapes, platforms=platforms, inside=inside)
