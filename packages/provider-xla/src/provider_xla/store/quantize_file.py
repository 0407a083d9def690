"""quantize_file: from float files to quantized parameters, one parameter at a time."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from interception_core.log import progress

from ..errors import StoreError
from ..plan.quantize import carried, prepacked
from ..plan.weight import WeightPlan, quantize_leaf
from ..program.arrays import is_array
from .files import appearing
from .float_files import Names, Source, TensorFiles, leaf_of, source_of
from .forms import Form, take_apart
from .manifest import build, check_ours
from .placing import Placement, shardings_of
from .safetensors import Writer
from .save import format_of, save
from .schema import StoredLeaf
from .tree import Leaf, describe, fill

if TYPE_CHECKING:
    from ..plan.plan import Plan


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
    check_ours(plan, "quantize_file")
    parameters = _Parameters(plan, source, names, sharding)
    if target is None:
        return fill(plan.params, [parameters.get(leaf, prepack) for leaf in parameters.each()])
    target = Path(target)
    if format_of(target, None) == "orbax":
        stored = [parameters.get(leaf, False) for leaf in parameters.each()]
        save(target, fill(plan.params, stored), plan, overwrite=overwrite)
    else:
        parameters.write(target, overwrite)
    return None


class _Parameters:
    """The parameters of a plan, from files.

    Raises:
        StoreError: ``names`` or ``sharding`` has a parameter that the plan lacks.
    """

    def __init__(self, plan: Plan, source: Any, names: Names, sharding: Any):
        self._plan, self._where, self._files = plan, source, TensorFiles(source)
        self.structure, self.leaves = describe(plan.params)
        known = [leaf.name for leaf in self.leaves]
        self._shardings = shardings_of(sharding, known)
        if names is not None and not callable(names) and (wrong := names.keys() - set(known)):
            raise StoreError(
                f"names has {', '.join(sorted(wrong))}, and the plan has no such parameter: it has "
                f"{', '.join(known)}."
            )
        self._sources: dict[str, Source] = {
            leaf.name: source_of(names, leaf.name) for leaf in self.leaves if is_array(leaf.value)
        }

    def each(self) -> Iterator[Leaf]:
        """Yield the parameters in order, with a progress bar of their bytes."""
        total = sum(getattr(leaf.value, "nbytes", 0) for leaf in self.leaves)
        # Gone at the end where a caller with several files has a bar.
        how = {"unit": "B", "unit_scale": True, "desc": "quantizing", "leave": None}
        with progress(total=total, **how) as bar:
            for leaf in self.leaves:
                yield leaf
                bar.update(getattr(leaf.value, "nbytes", 0))

    def get(self, leaf: Leaf, prepack: bool) -> Any:
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
        about = {"shape": list(array.shape), "dtype": array.dtype.name}
        stored = StoredLeaf(kind="array", about=about, name=leaf.name, tensors={"": leaf.name})
        sharding = self._shardings(stored, "", array.shape)
        return Placement(leaf.name, sharding).put(array)

    def _inputs(self, weight: WeightPlan) -> dict[str, jax.Array]:
        """Return the parameters that a derived weight is computed from."""
        assert weight.derived is not None
        by_path = {self._plan.prefix + leaf.path: leaf for leaf in self.leaves}
        return {path: self._array(by_path[path]) for path in weight.derived.leaves}

    def write(self, target: Path, overwrite: bool) -> None:
        """Write all to a safetensors file, one after the other."""
        forms = [(leaf.name, self._form(leaf)) for leaf in self.leaves]
        manifest, _ = build((self.structure, forms), None, self._plan)
        with contextlib.ExitStack() as stack:
            new = stack.enter_context(appearing(target, overwrite))
            writer = stack.enter_context(Writer(new, manifest))
            for leaf, stored in zip(self.each(), manifest.params.leaves, strict=True):
                if not stored.tensors:
                    continue
                form = take_apart(leaf.name, self.get(leaf, False))
                assert form.arrays is not None
                for part, array in form.arrays().items():
                    writer.write(stored.tensors[part], array)
                del form
            writer.finish()

    def _form(self, leaf: Leaf) -> Form:
        """Return the form that a parameter will have."""
        plan, path = self._plan, self._plan.prefix + leaf.path
        types = {one.path: jax.eval_shape(one.quantized, one.abstract())
                 for one in plan.weights.values()}  # fmt: skip
        stored = types.get(path, leaf.value)
        if leaf.name in self._sources:
            stored = carried(plan, path, leaf.value, stored, types)
        return take_apart(leaf.name, stored)
