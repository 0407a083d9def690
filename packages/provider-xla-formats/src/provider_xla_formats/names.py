"""Which tensors of a file the leaves of a tree are."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import quant_numerics as qn
from provider_xla.file_formats import (
    WIDER,
    Names,
    StoreError,
    is_stored,
    named_leaves,
    source_of,
    with_leaves,
)

from .affine import AffineWeight


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
    """Return the tensors of a file as the leaves of a tree.

    Args:
        where: the file, for errors.
        known: the names of its tensors.
        tensor: returns one: a QArray or AffineWeight, or a NumPy array.
        like: a tree of arrays or types; None for a dictionary by tensor.
        names: which tensors make each leaf.

    Raises:
        StoreError: a tensor is missing, or of another shape than the leaf.
    """
    if like is None:
        if names is not None:
            raise StoreError("names= says which tensors make the leaves of like=. Give both.")
        return {name: _stored(tensor(name)) for name in known}
    leaves = named_leaves(like)[1]
    found = []
    for leaf in leaves:
        source = source_of(names, leaf.name)
        for one in source.names:
            if one not in known:
                near = difflib.get_close_matches(one, known, n=3, cutoff=0.0)
                raise StoreError(
                    f"{leaf.name} must be made of tensors of {where}, got {one}: the nearest of "
                    f"{len(known)} are {', '.join(near) or 'none'}. Say by names= which make it."
                )
        arrays = [tensor(one) for one in source.names]
        about = f"{leaf.name}, of {', '.join(source.names)},"
        try:
            value = source.transform(*arrays) if source.transform else arrays[0]
        except Exception as error:
            raise StoreError(f"{about} has a transform that raised {error!r}.") from error
        found.append(_stored(_like(about, source, value, leaf.value)))
    return with_leaves(like, found)


def _like(about: str, source: Any, value: Any, wanted: Any) -> Any:
    """Return a leaf with the dtype that is wanted, if it can have it."""
    if tuple(np.shape(value)) != tuple(wanted.shape):
        hint = ""
        if source.transform is None and tuple(np.shape(value))[::-1] == tuple(wanted.shape):
            hint = f" It is the transpose: Source({source.names[0]!r}, transform=lambda w: w.T)."
        raise StoreError(
            f"{about} must be {list(wanted.shape)}, got {list(np.shape(value))}.{hint}"
        )
    dtype = jnp.dtype(wanted.dtype)
    if is_stored(value):
        return value.astype(dtype)
    value = np.asarray(value)
    if value.dtype != dtype and dtype.name not in WIDER.get(value.dtype.name, ()):
        raise StoreError(
            f"{about} must be {dtype.name} or narrower, got {value.dtype.name}. Give like= with "
            "that dtype, or convert it by a Source with a transform."
        )
    return value.astype(dtype, copy=False)


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
