"""The manifest: what a file holds, by which plan, written by what."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar

import jax
import msgspec

from interception_core import JaxtapError, Provider, StorablePlan, get_provider

from ..errors import PlanDiff, StoreError, damaged
from ..plan.plan import is_ours
from ..rules.qt_rule import QtRule
from ..rules.rule import QuantizationRule
from ..tables import table
from .carriers import is_storable
from .diff import beside, compare, compare_template
from .forms import CARRIER, Form, is_quantized, rule_json, rule_of
from .placing import Placement
from .schema import (
    FormatOnly,
    Object,
    Size,
    StoredLeaf,
    Tree,
    check,
    check_plan_json,
    is_intact,
    read_json,
)
from .tree import indices, named_leaves, unique

if TYPE_CHECKING:
    from ..plan.plan import Plan


def check_storable(plan: Any, call: str) -> None:
    """Check that a file can hold a plan.

    Raises:
        StoreError: ``plan`` is not a plan, or is another provider's without ``manifest`` and
            ``stored_types``.
    """
    if plan is None or is_ours(plan) or isinstance(plan, StorablePlan):
        return
    instead = "leave plan out" if call == "save" else "pass template= and leave plan out"
    raise StoreError(
        f"plan must have manifest() and stored_types(), got a {type(plan).__name__} without. Add "
        f"them (interception_core.StorablePlan), or {instead}."
    )


def manifest_of(plan: StorablePlan) -> dict[str, Any]:
    """Return another provider's plan as a file stores it.

    Raises:
        StoreError: the manifest is not JSON, or lacks the provider's name or config.
    """
    found = plan.manifest()
    try:
        text = json.dumps(found, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise StoreError(
            f"{type(plan).__name__}.manifest() must return JSON's types, got {found!r}: {error}."
        ) from error
    result = json.loads(text)
    name, config = (result.get(key) for key in ("provider", "config"))
    if not isinstance(name, str) or not isinstance(config, dict):
        raise StoreError(
            f'{type(plan).__name__}.manifest() must have a name as "provider" and an object as '
            f'"config", got {name!r} and {config!r}.'
        )
    return result


def manifest_changes(stored: Any, planned: Any, at: str = "") -> Iterator[str]:
    """Yield where two manifests differ, a line each."""
    if isinstance(stored, Mapping) and isinstance(planned, Mapping):
        for key in [*stored, *(key for key in planned if key not in stored)]:
            below = f"{at}.{key}" if at else str(key)
            yield from manifest_changes(stored.get(key), planned.get(key), below)
    elif stored != planned:
        yield f"{at}: {stored!r} -> {planned!r}"


VERSION = 1
"""The version of the format. Files of a later version are refused."""

_WRONG = (JaxtapError, ArithmeticError, AttributeError, LookupError, RecursionError, re.error,
          TypeError, ValueError)  # fmt: skip
"""What a rule raises for fields that no rule ever had."""

_PACKAGES = ("interception-core", "hijax-trace", "quant-numerics", "provider-xla")


class Manifest(Object, frozen=True):
    """What a file holds. ``print(manifest)`` shows it as a table.

    Attributes:
        params: the tree of parameters.
        extra: the tree that was saved beside the parameters; None if there is none.
        tensors: by name, the dtype and shape of each tensor, as it was before it was stored.
        plan: the plan that quantized the parameters, as JSON: ``rules``, each with the fields that
            are not at their defaults, and ``weights``. Of another provider, what
            ``StorablePlan.manifest`` returned. None if no plan was given.
        versions: the versions of the packages that wrote it, and of JAX.
        format: the version of the format.
    """

    params: Tree
    extra: Tree | None
    tensors: dict[str, tuple[str, tuple[Size, ...]]]
    plan: dict[str, Any] | None
    versions: dict[str, str]
    format: int = VERSION

    def __post_init__(self):
        if self.plan is not None:
            check_plan_json(self.plan)

    def rules(self) -> list[QuantizationRule]:
        """Return the rules the parameters were quantized by.

        Raises:
            StoreError: no plan was saved, it is another provider's, or its rules have a class or
                fields that no package here knows.
        """
        if self.plan is None:
            raise StoreError("There are no rules: the parameters were saved without their plan.")
        if "provider" in self.plan:
            raise StoreError(
                f"There are no rules: the plan is of the provider {self.plan['provider']!r}. "
                "manifest.provider() returns it."
            )
        rules: list[QuantizationRule] = []
        for found in self.plan["rules"]:
            try:
                rules.append(rule_of(found))
            except _WRONG as error:
                raise StoreError(f"The rule {found} is none of this version: {error}") from error
        return rules

    def provider(self) -> Provider:
        """Return a provider like the one that quantized the parameters.

        Raises:
            StoreError: as ``rules``.
            UnknownNameError: the provider is not installed.
        """
        if self.plan is not None and "provider" in self.plan:
            return get_provider(self.plan["provider"], **self.plan["config"])
        rules = self.rules()
        trains = any(isinstance(rule, QtRule) for rule in rules)
        return get_provider("qt" if trains else "ptq", rules=rules)

    def diff(self, plan: Any) -> PlanDiff:
        """Return what differs between the parameters here and those of a plan.

        Args:
            plan: a plan of provider-xla, or an ``interception_core.StorablePlan``.
        """
        if is_ours(plan):
            rules = None if self.plan is None else self.plan.get("rules", ())
            return compare(self.facts(), rules, plan)
        _, leaves = named_leaves(plan.stored_types())
        found = compare_template(self.facts(), leaves)
        if self.plan is None:
            return found
        changes = tuple(manifest_changes(self.plan, manifest_of(plan)))
        return dataclasses.replace(found, rules=changes)

    def facts(self) -> list[dict[str, Any]]:
        """Return what is known of each leaf of the parameters; see ``compare``."""
        ours = self.plan is not None and "provider" not in self.plan
        weights = self.plan["weights"] if ours else {}  # type: ignore[index]
        found = []
        for leaf in self.params.leaves:
            about = leaf.about
            facts: dict[str, Any] = {"name": leaf.name, "is": leaf.kind}
            if "shape" in about:
                facts |= {"shape": about["shape"], "dtype": about["dtype"], "is": "float"}
            if leaf.kind == CARRIER:
                own, *derived = (
                    one and (one["about"].get("qtype", "float"), one["about"]["shape"])
                    for one in about["held"]
                )
                facts["is"] = beside(own and own[0], derived)
            if is_quantized(leaf.kind):
                facts["is"] = about["qtype"]
            if is_quantized(leaf.kind) and "scale" in leaf.tensors:
                dtype, shape = self.tensors[leaf.tensors["scale"]]
                facts |= {"scales": list(shape), "scale_dtype": dtype}
                facts["ragged_tiles"] = about.get("ragged_tiles", [])
                if leaf.name in weights:
                    facts["method"] = weights[leaf.name]["method"]
            found.append(facts)
        return found

    def as_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return msgspec.to_builtins(self)

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Manifest:
        """Return what ``as_json`` returned.

        Raises:
            StoreError: the format is of a later version, or ``found`` is not a manifest.
        """
        try:
            written = check(found, FormatOnly)
            if written.format > VERSION:
                raise StoreError(
                    f"it has version {written.format} of the format, and this provider-xla "
                    f"reads versions up to {VERSION}. Install the version that wrote it "
                    f"({written.versions}), or a later one."
                )
            result = check(found, cls)
            result._check()
            return result
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
            raise StoreError(f"its manifest can't be read ({error!r})") from error

    def _check(self) -> None:
        """Raise ValueError unless trees, leaves and tensors fit each other."""
        for dtype, shape in self.tensors.values():
            if not is_storable(dtype) or not all(type(n) is int and n >= 0 for n in shape):
                raise ValueError(f"{dtype}{list(shape)} is not the type of an array")
        trees = [self.params] if self.extra is None else [self.params, self.extra]
        leaves = [leaf for tree in trees for leaf in tree.leaves]
        used = [tensor for leaf in leaves for tensor in leaf.tensors.values()]
        if sorted(used) != sorted(self.tensors):
            raise ValueError("its leaves are made of other tensors than it has")
        for leaf in leaves:
            if is_quantized(leaf.kind) and "scale" in leaf.tensors:
                _, scales = self.tensors[leaf.tensors["scale"]]
                if len(scales) != len(leaf.about["shape"]):
                    raise ValueError(f"the scales of {leaf.name} have another rank than it")
        for tree in trees:
            if sorted(indices(tree.structure)) != list(range(len(tree.leaves))):
                raise ValueError("its structure has other leaves than it lists")

    def __str__(self) -> str:
        rows = []
        for leaf in self.params.leaves:
            types = [self.tensors[tensor] for tensor in leaf.tensors.values()]
            parts = ", ".join(f"{dtype}{list(shape)}" for dtype, shape in types)
            runs = leaf.about.get("qtype", leaf.about.get("dtype", leaf.kind))
            rows.append([leaf.name, runs, str(leaf.about.get("shape", "")), parts])
        shown = table(rows, ["name", "is", "shape", "stored as"])
        count = sum(leaf.kind == CARRIER or is_quantized(leaf.kind) for leaf in self.params.leaves)
        wrote = ", ".join(f"{name} {version}" for name, version in sorted(self.versions.items()))
        return f"{shown}\n{count} of {len(rows)} leaves quantized; written by {wrote}"


class Opened:
    """What is open to be read: what it holds, and its tensors. A context manager."""

    manifest: Manifest

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def read(self, placements: Mapping[str, Placement]) -> Callable[[str], Any]:
        """Return a function from a tensor's name to it, on its devices. Each is read once."""
        raise NotImplementedError


_Beside = TypeVar("_Beside", bound="_HasManifest")


class _HasManifest(Protocol):
    @property
    def manifest(self) -> dict[str, Any]: ...


def read_sealed(path: Path, name: str, schema: type[_Beside]) -> tuple[_Beside, Manifest]:
    """Return the content of the JSON file of a checkpoint, and the manifest in it.

    Raises:
        FileNotFoundError: there is none.
        StoreError: it is damaged, or of a later version.
    """
    text = (path / name).read_bytes()
    if not is_intact(text):
        raise damaged(path, f"the checksum of {name} is not its own")
    with reading(path, f"its {name}"):
        found = check(read_json(text), schema)
        return found, Manifest.from_json(found.manifest)


@contextlib.contextmanager
def reading(path: Path, what: str) -> Iterator[None]:
    """Turn what malformed content raises into a StoreError that names the file."""
    try:
        yield
    except StoreError as error:
        raise StoreError(f"{path} can't be loaded: {error}") from error
    except (AttributeError, KeyError, ValueError, TypeError, RecursionError) as error:
        raise damaged(path, f"{what} can't be read ({error!r})") from error


def build(
    params: tuple[Any, Sequence[tuple[str, Form]]],
    extra: tuple[Any, Sequence[tuple[str, Form]]] | None,
    plan: Plan | StorablePlan | None,
) -> tuple[Manifest, dict[str, tuple[Form, str]]]:
    """Return a manifest, and each tensor's form and part."""
    taken = {"__metadata__"}
    tensors: dict[str, tuple[Form, str]] = {}

    def tree(prefix: str, structure: Any, leaves: Sequence[tuple[str, Form]]) -> Tree:
        stored = []
        for name, form in leaves:
            names = {}
            for part in form.parts:
                given = f"{prefix}{name}.{part}" if part else f"{prefix}{name}"
                names[part] = unique(given, taken)
                tensors[names[part]] = form, part
            stored.append(
                StoredLeaf(kind=form.kind, about=dict(form.about), name=name, tensors=names)
            )
        return Tree(structure, tuple(stored))

    versions = {name: importlib.metadata.version(name) for name in _PACKAGES}
    manifest = Manifest(
        tree("", *params),
        None if extra is None else tree("extra.", *extra),
        {name: form.parts[part] for name, (form, part) in tensors.items()},
        None if plan is None else plan_json(plan),
        {**versions, "jax": jax.__version__},
    )
    return manifest, tensors


def plan_json(plan: Any) -> dict[str, Any]:
    """Return a plan's rules and weights by name, as JSON.

    Of another provider's plan, its manifest.
    """
    if not is_ours(plan):
        return manifest_of(plan)
    _, leaves = named_leaves(plan.params)
    names = {plan.prefix + leaf.path: leaf.name for leaf in leaves}
    weights = {}
    for path, weight in plan.weights.items():
        found = weight.as_json()
        kept = ("shape", "dtype", "rule", "qtype", "method", "channel_axes", "tile_axes")
        if weight.derived is None:
            weights[names[path]] = {key: found[key] for key in kept} | {"path": path}
        else:
            kept = (*kept, "derived_from")
            weights[path] = {key: found[key] for key in kept} | {"path": path}
    return {"rules": [rule_json(rule) for rule in plan.rules.rules], "weights": weights}
