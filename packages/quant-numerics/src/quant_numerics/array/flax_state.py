"""Quantized arrays in the state dicts of flax.serialization."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import jax

from interception_core import when_imported

_kinds: list[type] = []
"""The classes to register; flax's module registers them when the program imports it."""


def register_state(kind: type) -> None:
    """Let flax.serialization write a pytree class: ``to_bytes``, ``to_state_dict`` and so on.

    The order of imports does not matter, and nothing imports flax.

    Args:
      kind: the class.
    """
    if not _kinds:
        when_imported("flax.serialization", _register_all)
    _kinds.append(kind)
    if _flax is not None:
        _register(_flax, kind)


_flax: ModuleType | None = None


def _register_all(module: ModuleType) -> None:
    global _flax
    _flax = module
    for kind in _kinds:
        _register(module, kind)


def _register(module: ModuleType, kind: type) -> None:
    module.register_serialization_state(kind, to_state, from_state, override=True)


def to_state(value: Any) -> dict[str, Any]:
    """Return a stored array as flax.serialization writes it: its format, and arrays by path."""
    found, _ = jax.tree_util.tree_flatten_with_path(value)
    return {
        "qtype": getattr(value, "qtype", type(value).__name__),
        **{_path(keys): leaf for keys, leaf in found},
    }


def from_state(target: Any, state: dict[str, Any]) -> Any:
    """Return the written array in the place of a similar one.

    Raises:
      ValueError: the two have other formats or other arrays.
    """
    expected = to_state(target)
    if expected.keys() != state.keys() or expected["qtype"] != state["qtype"]:
        raise ValueError(
            f"A parameter that was saved as {state.get('qtype')} with {sorted(state)} must be "
            f"loaded as such, got a target that is {expected['qtype']} with {sorted(expected)}. "
            "Load it into parameters that are quantized by the same rules."
        )
    found, treedef = jax.tree_util.tree_flatten_with_path(target)
    return jax.tree.unflatten(treedef, [state[_path(keys)] for keys, _ in found])


def _path(keys: tuple[Any, ...]) -> str:
    return "/".join(jax.tree_util.keystr((key,), simple=True) for key in keys)
