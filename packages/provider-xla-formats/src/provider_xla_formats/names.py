"""Which tensors of a file the leaves of a tree are."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from provider_xla.file_formats import StoreError, is_stored, named_leaves, with_leaves

from .affine import AffineWeight
from .float_files import Names, leaf_of, source_of


@dataclasses.dataclass(frozen=True)
class Target:
    """Which tensor a parameter becomes, or a part of it.

    Attributes:
        name: of the tensor.
        transform: makes the tensor of the parameter, a ``QArray`` or an array, such as
            ``lambda w: w.T``. None takes it as it is.
    """

    name: str
    transform: Callable[[Any], Any] | None = None


_Targets = str | Target | Sequence[Target]
Targets = Mapping[str, _Targets] | Callable[[str], _Targets | None] | None
"""Which tensors the parameters become, by the name of the leaf; None keeps that name."""


def load_tree(
    where: str, known: Collection[str], tensor: Callable[[str], Any], like: Any, names: Names
) -> Any:
    """Return the tensors of a file as the leaves of a tree; see ``leaf_of``.

    Without ``like`` the result is a dictionary by tensor.
    """
    if like is None:
        if names is not None:
            raise StoreError("names= says which tensors make the leaves of like=. Give both.")
        return {name: _stored(tensor(name)) for name in known}
    found = []
    for leaf in named_leaves(like)[1]:
        found.append(_stored(leaf_of(where, known, tensor, leaf, source_of(names, leaf.name))))
    return with_leaves(like, found)


def _stored(value: Any) -> Any:
    """Return a leaf as plans store it: packed if its storage has spare bits."""
    if qn.is_form(value):
        return value.with_values(lambda q: qn.pack(q) if qn.get_qtype(q.qtype).packable else q)
    value = np.asarray(value)
    # JAX would cut 64 bits to 32 without x64.
    is_wide = jax.dtypes.canonicalize_dtype(value.dtype) != value.dtype
    return value if is_wide else jnp.asarray(value)


def tensors_of(params: Any, names: Targets) -> list[tuple[str, str, Callable[[], Any]]]:
    """Return the tensors of a tree: leaf, name, and value.

    The value is a function without arguments, so that one tensor at a time is made.

    Raises:
        StoreError: two tensors would have one name, or a leaf is not an array of numbers.
    """
    found: list[tuple[str, str, Callable[[], Any]]] = []
    taken: dict[str, str] = {}
    for leaf in named_leaves(params)[1]:
        given = names(leaf.name) if callable(names) else (names or {}).get(leaf.name)
        given = leaf.name if given is None else given
        targets = [Target(given)] if isinstance(given, str) else given
        for target in targets if isinstance(targets, list | tuple) else [targets]:
            if not isinstance(target, Target):
                raise StoreError(
                    f"names must give a name, a Target or a list of these for {leaf.name}, got "
                    f"{given!r}."
                )
            if target.name in taken:
                raise StoreError(
                    f"{target.name} must be one tensor, got {taken[target.name]} and {leaf.name}. "
                    "Give them other names."
                )
            taken[target.name] = leaf.name
            found.append((leaf.name, target.name, _maker(leaf.name, leaf.value, target)))
    return found


def _maker(name: str, value: Any, target: Target) -> Callable[[], Any]:
    def make() -> Any:
        portable = _portable(name, value)
        if target.transform is None:
            return portable
        try:
            return target.transform(portable)
        except Exception as error:
            raise StoreError(f"{name} has a transform that raised {error!r}.") from error

    return make


def _portable(name: str, value: Any) -> Any:
    """Return a leaf as quantized values and scales, or a NumPy array."""
    if qn.is_form(value):
        value = value.portable().unpacked()
    if isinstance(value, qn.QArray | AffineWeight):
        return value
    if is_stored(value) or not isinstance(value, jax.Array | np.ndarray):
        raise StoreError(
            f"{name} must be an array, or quantized values with scales, to be written in another "
            f"format, got a {type(value).__name__}. Write what plan.quantize returned, without "
            "passes; functions and settings are not tensors."
        )
    return np.asarray(value)
