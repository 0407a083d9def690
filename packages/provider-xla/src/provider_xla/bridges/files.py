"""Files of model objects.

Apart from ``model.py``, since these alone need the libraries of an extra.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import jax

from interception_core import StorablePlan, hides_frames

from ..errors import QuantizationError, StoreError
from ..extras import bridge_of
from ..plan.plan import is_ours
from ..store.save import Format, load, load_extra, save
from .bridge import Bridge, Quantized, keeps_floats


@hides_frames
def save_model(
    path: str | os.PathLike[str],
    model: Any,
    *,
    format: Format | None = None,
    overwrite: bool = False,
) -> None:
    """Save all that a model object has learned or measured, bit for bit.

    That is its parameters, stored or float, with their plan; adapters; statistics of norms, random
    keys and other variables; and the ranges of static activations. KV caches and intermediates are
    left out.

    Args:
        path: path of the file, or of the folder: see ``save``.
        model: a model as ``quantize_model`` takes it or returns it, of any framework with a bridge.
            A Linen module must be bound to its variables.
        format: see ``save``.
        overwrite: whether to replace what is there.

    Raises:
        QuantizationError: the model holds no parameters.
        StoreError: see ``save``.
        UnknownNameError: there is no bridge for such a model.
    """
    bridge = bridge_of(model)
    quantized = bridge.quantized(model)
    parameters = _parameters(bridge, model)
    beside = {"rest": bridge.rest(model)}
    beside |= {} if quantized is None else {"statistics": quantized.statistics}
    extra = {name: tree for name, tree in beside.items() if tree is not None}
    plan = _plan_of(quantized)
    save(path, parameters, plan, extra=extra or None, format=format, overwrite=overwrite)


@hides_frames
def load_model(
    path: str | os.PathLike[str], model: Any, *, sharding: Any = None, prepack: bool = True
) -> Any:
    """Return a model with what ``save_model`` wrote.

    Args:
        path: path of the file or of the folder.
        model: a model of the same kind, quantized by the same rules if the saved one was. It gives
            the structure alone, so that its parameters may be types:
            ``quantize_model(nnx.eval_shape(make), provider, x)``. It stays as it is.
        sharding: where parameters go; see ``load``.
        prepack: whether parameters are packed for kernels as the plan says.

    Returns:
        A new model of the same kind.

    Raises:
        StoreMismatchError: the file holds other parameters.
        StoreError: the file holds other variables, or can't be read; see ``load``.
        QuantizationError: the model holds no parameters.
        UnknownNameError: there is no bridge for such a model.
    """
    bridge = bridge_of(model)
    quantized = bridge.quantized(model)
    template = _parameters(bridge, model)
    options = {"sharding": sharding, "prepack": prepack}
    parameters = load(path, plan=_plan_of(quantized), template=template, **options)
    found = load_extra(path) or {}
    rest = found.get("rest")
    missing = _paths(bridge.rest(model)) ^ _paths(rest)
    if missing:
        raise StoreError(
            f"{path} must hold the variables of a {type(model).__name__}, got a file that differs "
            f"in {', '.join(sorted(missing))}. Save such a model by save_model."
        )
    if quantized is None:
        new = bridge.restore(model, parameters)
    else:
        statistics = found.get("statistics", quantized.statistics)
        quantized = dataclasses.replace(quantized, statistics=statistics)
        new = bridge.rebuild(model, parameters, quantized)
    return new if rest is None else bridge.with_rest(new, rest)


def _parameters(bridge: Bridge, model: Any) -> Any:
    parameters = bridge.parameters(model)
    if parameters is None:
        raise QuantizationError(
            f"A {type(model).__name__} must hold its parameters to be saved or loaded, got one "
            "without. Bind a Linen module: net.bind(variables)."
        )
    return parameters


def _plan_of(quantized: Quantized | None) -> Any:
    """Return the plan that stored a model's parameters; None if they are float."""
    if quantized is None or keeps_floats(quantized.provider):
        return None
    plan = quantized.plan
    return plan if is_ours(plan) or isinstance(plan, StorablePlan) else None


def _paths(tree: Any) -> set[str]:
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {jax.tree_util.keystr(keys, simple=True, separator="/") for keys, _ in found}
