"""load: parameters from a file or a checkpoint, onto devices."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from interception_core import StorablePlan

from ..errors import QuantizationWarning, StoreError, StoreMismatchError
from ..forms import AdaptedWeight
from ..plan.quantize import prepacked
from . import orbax, safetensors, shards
from .diff import compare_template
from .forms import put_together
from .manifest import Manifest, Opened, check_storable, is_ours
from .placing import find_placements, shardings_of
from .schema import Tree
from .tree import Leaf, describe, fill, is_whole, rebuild

if TYPE_CHECKING:
    from ..plan.plan import Plan


def load(
    path: str | os.PathLike[str],
    *,
    plan: Plan | StorablePlan | None = None,
    template: Any = None,
    sharding: Any = None,
    prepack: bool = True,
) -> Any:
    """Load parameters of ``save`` or ``quantize_file``, executing nothing.

    Everything is checked before it is used: the checksums of every tensor and of the header, or of
    every file of a checkpoint. At its peak this needs, beside what is loaded, one tensor on the
    host.

    Args:
        path: path of the file, or of the folder of a checkpoint or of shards. If several processes
            load one folder of shards, with equal arguments, each reads what its devices need.
        plan: the plan that quantized the parameters, or one that gives the same formats. It also
            says the structure of the result. A plan of provider-xla, or any
            ``interception_core.StorablePlan``.
        template: a tree with the structure of the result, of arrays or their types. Leaves that
            can't be saved, such as functions, are taken from it. Default: the plan's parameters.
            Without plan and template, dicts, lists and tuples come back as such, and other nodes
            as dicts of their fields.
        sharding: where the arrays go: a ``jax.sharding.Sharding`` for all; a function that takes a
            name such as ``"layers.0.up"`` and returns one, or None; or a tree of shardings, with
            the structure of the parameters or a prefix of it. Scales are cut like the quantized
            values if they can be. Default: JAX's default device.
        prepack: whether parameters are packed for kernels as the plan says; see ``Plan.prepack``.

    Returns:
        The parameters: a tree of arrays, and of quantized ones as ``plan.quantize`` returns them.

    Raises:
        StoreMismatchError: the file holds something else than the plan or the template says; the
            message has a diff.
        StoreError: the file was cut short or altered, was written by something else or by a later
            version, or its arrays can't be sharded so.
        MissingExtraError: the library is not installed: ``provider-xla[safetensors]`` or
            ``[orbax]``.

    Warns:
        QuantizationWarning: the rules of the plan differ from those in the file, though they give
            the same parameters.
    """
    check_storable(plan, "load")
    path = Path(path)
    with _open(path) as reader:
        manifest = reader.manifest
        if plan is not None:
            _check_plan(path, manifest, plan)
        if template is None and is_ours(plan):
            template = _with_adapters(plan, manifest)
        elif template is None and isinstance(plan, StorablePlan):
            template = plan.stored_types()
        leaves = None if template is None else describe(template)[1]
        if leaves is not None:
            _check_template(path, manifest, leaves)
        values = _read(path, reader, manifest.params, sharding, leaves)
    if is_ours(plan) and prepack:
        paths = {leaf.name: plan.prefix + leaf.path for leaf in _planned(plan)}
        for i, leaf in enumerate(manifest.params.leaves):
            if leaf.name in paths:  # not an adapter
                values[i] = prepacked(plan, paths[leaf.name], values[i])
    if leaves is None:
        return rebuild(manifest.params.structure, values)
    by_name = {at.name: value for at, value in zip(manifest.params.leaves, values, strict=True)}
    return fill(template, [by_name[leaf.name] for leaf in leaves])


def load_extra(path: str | os.PathLike[str], *, template: Any = None, sharding: Any = None) -> Any:
    """Load the tree that was saved beside the parameters, as ``save(..., extra=...)``.

    Return None if there is none. Arguments and errors: see ``load``.
    """
    path = Path(path)
    with _open(path) as reader:
        manifest = reader.manifest
        if manifest.extra is None:
            return None
        leaves = None if template is None else describe(template, root="extra")[1]
        names = {leaf.name for leaf in manifest.extra.leaves}
        if leaves is not None and (wrong := names ^ {leaf.name for leaf in leaves}):
            raise StoreError(
                f"The tree beside the parameters of {path} and the template differ: one of them "
                f"has not {', '.join(sorted(wrong))}."
            )
        values = _read(path, reader, manifest.extra, sharding, leaves)
        if leaves is None:
            return rebuild(manifest.extra.structure, values)
        by_name = {at.name: value for at, value in zip(manifest.extra.leaves, values, strict=True)}
        return fill(template, [by_name[leaf.name] for leaf in leaves])


def read_manifest(path: str | os.PathLike[str]) -> Manifest:
    """Return what a file or a checkpoint holds, without its tensors.

    Raises:
        StoreError: as ``load``; of a safetensors file, where the header is damaged.
    """
    with _open(Path(path)) as reader:
        return reader.manifest


def _open(path: Path) -> Opened:
    if not path.exists():
        raise StoreError(f"{path} does not exist.")
    if (path / shards.INDEX).is_file():
        return shards.Reader(path)
    return orbax.Reader(path) if path.is_dir() else safetensors.Reader(path)


def _planned(plan: Plan) -> list[Leaf]:
    return describe(plan.params)[1]


def _with_adapters(plan: Plan, manifest: Manifest) -> Any:
    """Return a plan's parameters with the adapters in a file."""
    names = {leaf.name for leaf in manifest.params.leaves}
    found = []
    for leaf in _planned(plan):
        adapter = plan.adapters.get(plan.prefix + leaf.path)
        if adapter is None or not {f"{leaf.name}.{name}" for name in adapter.shapes} <= names:
            found.append(leaf.value)
            continue
        arrays = {name: jax.ShapeDtypeStruct(shape, adapter.dtype)
                  for name, shape in adapter.shapes.items()}  # fmt: skip
        found.append(AdaptedWeight(leaf.value, arrays, adapter.form))
    return fill(plan.params, found)


def _check_plan(path: Path, manifest: Manifest, plan: Plan | StorablePlan) -> None:
    diff = manifest.diff(plan)
    # Only for leaves of our plans is it known whether they fit although the rules differ.
    if diff.of_leaves or (diff and not is_ours(plan)):
        raise StoreMismatchError(
            f"{path} was saved with another plan than the one to load it with.\n{diff}\n"
            "Load it with its own plan or with none, or quantize the parameters again.",
            diff,
        )
    if diff:
        warnings.warn(
            f"The parameters of {path} fit the plan, whose rules are others:\n{diff}",
            QuantizationWarning,
            stacklevel=3,
        )


def _check_template(path: Path, manifest: Manifest, leaves: list[Leaf]) -> None:
    diff = compare_template(manifest.facts(), leaves)
    if diff:
        hint = (
            "" if diff.changed or diff.missing else "\nPass template=, a tree that has these too."
        )
        raise StoreMismatchError(
            f"{path} holds another tree than the template.\n{diff}{hint}", diff
        )


def _read(
    path: Path, reader: Opened, tree: Tree, sharding: Any, template: list[Leaf] | None
) -> list[Any]:
    """Read the leaves of a tree, one after the other."""
    shardings = shardings_of(sharding, [leaf.name for leaf in tree.leaves])
    placements = find_placements(tree.leaves, reader.manifest.tensors, shardings)
    given = {leaf.name: leaf.value for leaf in template or ()}
    take = reader.read(placements)
    values = []
    for leaf in tree.leaves:
        if leaf.kind == "static":
            if leaf.name not in given or is_whole(given[leaf.name]):
                raise StoreError(
                    f"{leaf.name} of {path} was a {leaf.about['type']}, which can't be saved. Pass "
                    "template=, a tree of the same structure that has it."
                )
            values.append(given[leaf.name])
            continue
        parts = {part: take(tensor) for part, tensor in leaf.tensors.items()}
        values.append(put_together(f"{path}: {leaf.name}", leaf.kind, leaf.about, parts))
    return values
