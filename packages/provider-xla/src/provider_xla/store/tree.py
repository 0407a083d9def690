"""Names of the leaves of a tree, and its structure as JSON."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

import quant_numerics as qn

from ..errors import StoreError
from ..forms import is_adapted
from ..program.arrays import is_stored


class Leaf(NamedTuple):
    """A leaf: its dotted name, pytree path, and value."""

    name: str
    path: str
    value: Any


def is_whole(node: Any) -> bool:
    """Return whether a node is stored as one thing."""
    return is_stored(node) or isinstance(node, qn.Calibration | qn.Statistics)


def named_leaves(
    tree: Any, root: str = "params", is_leaf: Callable[[Any], bool] = is_whole
) -> tuple[Any, list[Leaf]]:
    """Return the structure of a tree, and its leaves in JAX's order.

    The structure is JSON: the index of a leaf, None, ``{"dict": [[key, structure], ...]}``,
    ``{"list": [...]}``, ``{"tuple": [...]}`` or, for other nodes, ``{"object": class name,
    "fields": [[name, structure], ...]}``.

    The arrays of the adapter of a parameter ``w`` are named by it, such as ``w.a`` and ``w.b``.

    Args:
        tree: any pytree.
        root: the name of the leaf if the tree is a single one.
        is_leaf: tells the nodes that are leaves in addition to JAX's.

    Raises:
        StoreError: a key is not text, a number, or a tuple of these.
    """
    leaves: list[Leaf] = []
    names = {"__metadata__"}  # reserved in safetensors files

    def visit(node: Any, path: tuple) -> Any:
        if not is_leaf(node):
            if node is None:
                return None
            found, _ = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)
            if not (len(found) == 1 and found[0][0] == ()):
                # A parameter has the same name with an adapter and without.
                own = (GetAttrKey("base"),) if is_adapted(node) else None
                children = [
                    (keys[-1], visit(child, path if keys == own else (*path, *keys)))
                    for keys, child in found
                ]
                return _node(node, children)
        name = unique(".".join(_text(key) for key in path) or root, names)
        leaves.append(Leaf(name, jax.tree_util.keystr(path), node))
        return len(leaves) - 1

    return visit(tree, ()), leaves


def unique(name: str, taken: set[str]) -> str:
    """Take a name, with a suffix if it is taken; return it."""
    while name in taken:
        name += "~"
    taken.add(name)
    return name


def indices(structure: Any) -> list[int]:
    """Return the indices of the leaves that a structure has.

    Raises:
        ValueError: it is not a structure; see ``named_leaves``.
    """
    if structure is None:
        return []
    if type(structure) is int:
        return [structure]
    if not isinstance(structure, dict):
        raise ValueError(f"{structure!r} is not a structure of a tree")
    children = structure.get("list", structure.get("tuple"))
    if children is None:
        pairs = structure["dict"] if "dict" in structure else structure["fields"]
        children = [child for _, child in pairs]
    return [index for child in children for index in indices(child)]


def rebuild(structure: Any, leaves: Sequence[Any]) -> Any:
    """Return the tree of a structure as dicts, lists and tuples."""
    if structure is None:
        return None
    if isinstance(structure, int):
        return leaves[structure]
    for kind, build in (("list", list), ("tuple", tuple)):
        if kind in structure:
            return build(rebuild(child, leaves) for child in structure[kind])
    pairs = structure["dict"] if "dict" in structure else structure["fields"]
    return {_key(key): rebuild(child, leaves) for key, child in pairs}


def with_leaves(tree: Any, values: Sequence[Any]) -> Any:
    """Return ``tree`` with other leaves, those of ``named_leaves`` in order."""
    return jax.tree.unflatten(jax.tree.structure(tree, is_leaf=is_whole), values)


def _node(node: Any, children: Sequence[tuple[Any, Any]]) -> Any:
    keys = [key for key, _ in children]
    if isinstance(node, dict) or (keys and all(isinstance(key, DictKey) for key in keys)):
        return {"dict": [[_json(key.key), child] for key, child in children]}
    if isinstance(node, list | tuple) and all(isinstance(key, SequenceKey) for key in keys):
        return {_sequence(node): [child for _, child in children]}
    fields = [[_json(_value(key)), child] for key, child in children]
    return {"object": type(node).__name__, "fields": fields}


def _sequence(node: Any) -> str:
    return "tuple" if isinstance(node, tuple) else "list"


def _value(key: Any) -> Any:
    if isinstance(key, DictKey | FlattenedIndexKey):
        return key.key
    if isinstance(key, SequenceKey):
        return key.idx
    return key.name if isinstance(key, GetAttrKey) else str(key)


def _text(key: Any) -> str:
    value = _value(key)
    return ".".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _json(key: Any) -> Any:
    if isinstance(key, str | int | float):
        return key
    if isinstance(key, tuple):
        return {"tuple": [_json(part) for part in key]}
    raise StoreError(
        f"{key!r} is a {type(key).__name__}, and a key of a dict that is saved must be text, a "
        "number, or a tuple of these."
    )


def _key(key: Any) -> Any:
    return tuple(map(_key, key["tuple"])) if isinstance(key, dict) else key
