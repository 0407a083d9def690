"""save: quantized parameters to a file or a checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax

from ..errors import StoreError, StoreMismatchError
from ..program.granularity import Granularity
from . import orbax
from .files import appearing
from .forms import Form, take_apart
from .manifest import Manifest, build, check_storable, is_ours
from .safetensors import Writer
from .shards import appearing_in_all, file_name, own_pieces, step, write_index, write_pieces
from .tree import describe

if TYPE_CHECKING:
    from interception_core import StorablePlan

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
    structure, leaves = describe(params)
    granularities, derived = plan_granularities(plan) if is_ours(plan) else ({}, {})
    forms = [
        (at.name, take_apart(at.name, at.value, granularities.get(at.name), derived))
        for at in leaves
    ]
    beside = None
    if extra is not None:
        extra_structure, extra_leaves = describe(extra, root="extra")
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
    with appearing(path, overwrite) as new:
        if kind == "orbax":
            orbax.write(new, manifest, dict(arrays_of(tensors)))
        else:
            with Writer(new, manifest) as writer:
                for name, array in arrays_of(tensors):
                    writer.write(name, array)
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
    _, leaves = describe(plan.params)
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
