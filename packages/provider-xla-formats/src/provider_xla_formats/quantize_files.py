"""quantize_file: from float files to quantized parameters, one parameter at a time."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from interception_core.log import progress
from provider_xla import StoreError, save
from provider_xla.features import carried, is_array, prepacked, quantize_leaf
from provider_xla.file_formats import Leaf, named_leaves, placer, save_each, with_leaves

from .float_files import Names, Source, TensorFiles, leaf_of, source_of

if TYPE_CHECKING:
    from provider_xla import Plan, WeightPlan


def quantize_file(
    plan: Plan,
    source: str | os.PathLike[str] | Sequence[str | os.PathLike[str]],
    target: str | os.PathLike[str] | None = None,
    *,
    names: Names = None,
    sharding: Any = None,
    prepack: bool = True,
    overwrite: bool = False,
) -> Any:
    """Quantize parameters from float safetensors files, without ever holding them all.

    Make the plan with abstract parameters (``jax.eval_shape`` of an ``init`` function, say). Each
    parameter is read, quantized and freed before the next one. At its peak this needs, beside the
    result, a few copies of one float parameter: as read, put together, moved to the device, and
    quantized. If ``target`` is a file, each parameter is written at once, and none is kept. A
    terminal shows a progress bar.

    Args:
        plan: how to quantize.
        source: a safetensors file; the index of several (``model.safetensors.index.json``); a
            folder with one of these; or a sequence of files.
        target: where to save the quantized parameters, as ``save`` does; None to return them.
        names: which tensors make each parameter: a mapping from the parameter's name, which is its
            path joined by dots, such as ``"layers.0.up"``, or a function of that name. It gives
            the name of a tensor, or a ``Source`` of several tensors or with a transform. For None,
            or a name that the mapping lacks, the tensor has the parameter's name. Other tensors
            are ignored.
        sharding: where parameters go; see ``load``.
        prepack: whether returned parameters are packed for kernels; see ``Plan.quantize``.
        overwrite: whether to replace ``target``.

    Returns:
        The tree of the plan, quantized; None with a ``target``.

    Raises:
        StoreError: a tensor is missing, or has another shape or dtype than the plan's parameter;
            or a file is damaged. Nothing is written then.
        QuantizationError: a parameter has values that are not finite, or scales that the plan's
            dtype of scales does not hold.
        MissingExtraError: safetensors is not installed: ``provider-xla[safetensors]``.
    """
    if not hasattr(plan, "weights") or not hasattr(plan, "absorbed"):
        raise StoreError(
            f"quantize_file needs a plan of provider-xla, got a {type(plan).__name__}. Save what "
            "plan.quantize returns instead."
        )
    parameters = _Parameters(plan, source, names, sharding)
    target = None if target is None else Path(target)
    if target is not None and target.suffix == ".safetensors":
        types = plan.quantized_types(plan.params, prepack=False)
        save_each(target, types, parameters.each(prepack=False), plan, overwrite=overwrite)
        return None
    stored = with_leaves(plan.params, list(parameters.each(prepack and target is None)))
    if target is None:
        return stored
    save(target, stored, plan, overwrite=overwrite)
    return None


class _Parameters:
    """The parameters of a plan, from files.

    Raises:
        StoreError: ``names`` or ``sharding`` has a parameter that the plan lacks.
    """

    def __init__(self, plan: Plan, source: Any, names: Names, sharding: Any):
        self._plan, self._where, self._files = plan, source, TensorFiles(source)
        _, self.leaves = named_leaves(plan.params)
        known = [leaf.name for leaf in self.leaves]
        self._put = placer(sharding, known)
        if names is not None and not callable(names) and (wrong := names.keys() - set(known)):
            raise StoreError(
                f"names has {', '.join(sorted(wrong))}, and the plan has no such parameter: it has "
                f"{', '.join(known)}."
            )
        self._sources: dict[str, Source] = {
            leaf.name: source_of(names, leaf.name) for leaf in self.leaves if is_array(leaf.value)
        }

    def each(self, prepack: bool) -> Iterator[Any]:
        """Yield what is stored for each parameter in order, with a progress bar of their bytes."""
        total = sum(getattr(leaf.value, "nbytes", 0) for leaf in self.leaves)
        # Gone at the end where a caller with several files has a bar.
        how = {"unit": "B", "unit_scale": True, "desc": "quantizing", "leave": None}
        with progress(total=total, **how) as bar:
            for leaf in self.leaves:
                yield self._get(leaf, prepack)
                bar.update(getattr(leaf.value, "nbytes", 0))

    def _get(self, leaf: Leaf, prepack: bool) -> Any:
        """Return a parameter, quantized if planned; other values from the plan."""
        if leaf.name not in self._sources:
            return leaf.value
        plan, path = self._plan, self._plan.prefix + leaf.path
        weight, stored = plan.weights.get(path), leaf.value
        if path not in plan.absorbed:
            stored = jax.block_until_ready(self._array(leaf))
            if weight is not None:
                value, stored = stored, quantize_leaf(weight, stored)
                value.delete()
        derived = {
            one.path: quantize_leaf(one, one.derived.expression.evaluate(self._inputs(one)))
            for one in plan.beside(path).values()
            if one.derived is not None
        }
        stored = carried(plan, path, leaf.value, stored, derived)
        return prepacked(plan, path, stored) if prepack else stored

    def _array(self, leaf: Leaf) -> jax.Array:
        """Return a parameter as it is in the files."""
        files, source = self._files, self._sources[leaf.name]
        array = leaf_of(self._where, files, files.read_float, leaf, source)
        array = np.ascontiguousarray(array).reshape(array.shape)  # it gives a scalar an axis
        return self._put(leaf.name, array)

    def _inputs(self, weight: WeightPlan) -> dict[str, jax.Array]:
        """Return the parameters that a derived weight is computed from."""
        assert weight.derived is not None
        by_path = {self._plan.prefix + leaf.path: leaf for leaf in self.leaves}
        return {path: self._array(by_path[path]) for path in weight.derived.leaves}
