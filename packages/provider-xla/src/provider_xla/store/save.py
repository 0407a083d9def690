"""save and load: parameters to a file or a checkpoint, and from it, onto devices."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax

from interception_core import StorablePlan

from ..errors import QuantizationWarning, StoreError, StoreMismatchError
from ..forms import AdaptedWeight
from ..plan.plan import is_ours
from ..plan.quantize import prepacked
from ..plan.weight import Granularity
from . import orbax, safetensors, shards
from .diff import compare_template
from .files import atomic_write
from .forms import Form, put_together, take_apart
from .manifest import Manifest, Opened, build, check_storable
from .placing import find_placements, shardings_of
from .safetensors import Writer
from .schema import Tree
from .shards import appearing_in_all, file_name, own_pieces, step, write_index, write_pieces
from .tree import Leaf, is_whole, named_leaves, rebuild, with_leaves

if TYPE_CHECKING:
    from ..plan.plan import Plan


Format = Literal["safetensors", "orbax", "shards"]


def save(
    path: str | os.PathLike[str],
    params: Any,
    plan: Plan | StorablePlan | None = None,
    *,
    extra: Any = None,
    format: Format | None = None,
    overwrite: bool = False,
) -> None:
    """Save parameters that a plan quantized, bit for bit.

    Everything is written under another name first, so that ``path`` is whole or doesn't exist.
    Tensors are written one after the other. Orbax gets all at once, with a copy of those that have
    to be converted.

    Args:
        path: path of the file, or of the folder for orbax and shards.
        params: any tree: arrays of numbers and random keys, ``QArray``, ``PackedQArray``,
            ``Calibration``, ``Statistics``, and Python's bool, int, float and str.
            ``PrepackedWeight`` is saved as quantized values and scales, ``TransformedWeight`` with
            the maps for its activations. Of other leaves, such as functions, only the name is
            saved: give ``load`` a template that has them.
        plan: the plan that quantized them, of provider-xla or any
            ``interception_core.StorablePlan``. It is stored in the file, and ``params`` must have
            the formats that it says.
        extra: another tree, for example the ranges that ``plan.calibrate`` returned; see
            ``load_extra``.
        format: "safetensors", "orbax" or "shards"; None for "safetensors" where ``path`` ends in
            ``.safetensors``, otherwise "shards" where arrays are spread over several processes,
            and "orbax" where they are not. "shards" is a folder of safetensors files, one of each
            process, with an index: all processes call ``save`` with equal arguments, on a file
            system that they share.
        overwrite: whether to replace what is there. A file is replaced in one step; a folder is
            moved away before.

    Raises:
        StoreMismatchError: ``params`` differs from what the plan says; the message has a diff.
        StoreError: a leaf or the plan can't be saved, or ``path`` exists. If it fails in one of
            several processes, it is raised in all.
        MissingExtraError: orbax-checkpoint is not installed: ``provider-xla[orbax]``.
    """
    check_storable(plan, "save")
    path = Path(path)
    spread = [name for tree in (params, extra) for name in _spread(tree)]
    if format is None and spread and path.suffix != ".safetensors":
        format = "shards"
    kind = format_of(path, format)
    if spread and kind != "shards":
        raise StoreError(
            f"{spread[0]} is spread over several processes, which {kind} can't save. Call save in "
            "all of them with a folder and format='shards'."
        )
    structure, leaves = named_leaves(params)
    granularities, derived = plan_granularities(plan) if is_ours(plan) else ({}, {})
    forms = [
        (at.name, take_apart(at.name, at.value, granularities.get(at.name), derived))
        for at in leaves
    ]
    beside = None
    if extra is not None:
        extra_structure, extra_leaves = named_leaves(extra, root="extra")
        extras = [(at.name, take_apart(f"extra.{at.name}", at.value)) for at in extra_leaves]
        beside = extra_structure, extras
    manifest, tensors = build((structure, forms), beside, plan)
    if plan is not None:
        diff = manifest.diff(plan)
        if diff.of_leaves:
            what = "The parameters are not what the plan quantizes them to"
            raise StoreMismatchError(f"{what}.\n{diff}", diff)
    for name, (form, _) in tensors.items():
        if form.arrays is None:
            raise StoreError(f"{name} is abstract, and only arrays can be saved.")
    if kind == "shards":
        _write_shards(path, manifest, tensors, overwrite)
        return
    with atomic_write(path, overwrite) as new:
        if kind == "orbax":
            orbax.write(new, manifest, dict(arrays_of(tensors)))
        else:
            with Writer(new, manifest) as writer:
                for name, array in arrays_of(tensors):
                    writer.write(name, array)
                writer.finish()


def save_each(
    path: str | os.PathLike[str],
    types: Any,
    values: Iterable[Any],
    plan: Plan,
    *,
    overwrite: bool = False,
) -> None:
    """Save parameters that are made one after the other to a safetensors file, keeping none.

    Args:
        path: path of the file.
        types: the tree of what a plan stores, unpacked, with types for arrays:
            ``plan.quantized_types(params, prepack=False)``.
        values: what is stored for each of its leaves, in JAX's order; each is written before the
            next one is asked for.
        plan: the plan.
        overwrite: whether to replace what is there.

    Raises:
        StoreError: as ``save``. Nothing is written then, nor where ``values`` raises an error.
    """
    structure, leaves = named_leaves(types)
    forms = [(at.name, take_apart(at.name, at.value)) for at in leaves]
    manifest, _ = build((structure, forms), None, plan)
    with atomic_write(Path(path), overwrite) as new, Writer(new, manifest) as writer:
        for leaf, value in zip(manifest.params.leaves, values, strict=True):
            if leaf.tensors:
                form = take_apart(leaf.name, value)
                assert form.arrays is not None
                for part, array in form.arrays().items():
                    writer.write(leaf.tensors[part], array)
        writer.finish()


def _spread(tree: Any) -> list[str]:
    """Return the paths of the leaves that other processes have parts of."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [
        jax.tree_util.keystr(path)
        for path, leaf in found
        if isinstance(leaf, jax.Array)
        and not isinstance(leaf, jax.core.Tracer)  # refused where leaves are described
        and not leaf.is_deleted()
        and not leaf.is_fully_addressable
    ]


def _write_shards(
    path: Path, manifest: Manifest, tensors: Mapping[str, tuple[Form, str]], overwrite: bool
) -> None:
    """Write the shards of this process, and in process 0 the index."""
    process, count = jax.process_index(), jax.process_count()
    with appearing_in_all(path, overwrite) as folder:
        # Not in a step: unpacking may be a computation that all processes must take part in.
        arrays = dict(arrays_of(tensors))

        def write() -> Any:
            pieces = {name: own_pieces(x, process == 0) for name, x in arrays.items()}
            return write_pieces(folder / file_name(process, count), manifest, pieces)

        def finish() -> None:
            if process == 0:
                write_index(folder, manifest, listed)

        listed = step(f"Writing {path}", write)
        step(f"Writing {path}", finish)


def format_of(path: Path, format: str | None) -> str:
    """Return the format of a path."""
    if format not in (None, "safetensors", "orbax", "shards"):
        raise StoreError(
            f"format is {format!r}. It must be 'safetensors', 'orbax', 'shards' or None."
        )
    return format or ("safetensors" if path.suffix == ".safetensors" else "orbax")


def plan_granularities(plan: Plan) -> tuple[dict[str, Granularity], dict[str, Granularity]]:
    """Return the granularities of weights by name, and of derived weights.

    The latter are by the key of their expression.
    """
    _, leaves = named_leaves(plan.params)
    found = {at.name: plan.weights.get(plan.prefix + at.path) for at in leaves}
    derived = {key: weight.granularity for key, weight in plan.derived.items()}
    own = {name: weight.granularity for name, weight in found.items() if weight is not None}
    return own, derived


def arrays_of(tensors: Mapping[str, tuple[Form, str]]) -> Iterator[tuple[str, Any]]:
    """Yield the name and the array of each tensor, those of one form after the other.

    Some forms compute their arrays, all at once: a writer that keeps none holds those of one form.
    """
    by_form: dict[int, tuple[Form, dict[str, str]]] = {}
    for name, (form, part) in tensors.items():
        by_form.setdefault(id(form), (form, {}))[1][part] = name
    for form, names in by_form.values():
        assert form.arrays is not None
        for part, array in form.arrays().items():
            yield names[part], array


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
        leaves = None if template is None else named_leaves(template)[1]
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
    return with_leaves(template, [by_name[leaf.name] for leaf in leaves])


def load_extra(path: str | os.PathLike[str], *, template: Any = None, sharding: Any = None) -> Any:
    """Load the tree that was saved beside the parameters, as ``save(..., extra=...)``.

    Return None if there is none. Arguments and errors: see ``load``.
    """
    path = Path(path)
    with _open(path) as reader:
        manifest = reader.manifest
        if manifest.extra is None:
            return None
        leaves = None if template is None else named_leaves(template, root="extra")[1]
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
        return with_leaves(template, [by_name[leaf.name] for leaf in leaves])


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
    return named_leaves(plan.params)[1]


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
    return with_leaves(plan.params, found)


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
