"""Where loaded arrays go: on which devices, cut in which way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from ..errors import StoreError
from ..program.arrays import followed
from .forms import CARRIER, part_of
from .schema import StoredLeaf
from .tree import Leaf, is_whole, named_leaves

Shardings = Callable[[StoredLeaf, str, Sequence[int]], Sharding | None]
"""Returns the sharding of a part of a leaf of this shape; None for JAX's default device, to
which the part is not bound."""


_WIDE = {"float64", "int64", "uint64", "complex128"}


@dataclasses.dataclass(frozen=True)
class Placement:
    """Where a tensor goes.

    Attributes:
        name: name of the tensor, for errors.
        sharding: its sharding on devices; None for JAX's default device.
        on_host: whether it stays a NumPy array.
    """

    name: str
    sharding: Sharding | None = None
    on_host: bool = False

    def put(self, array: np.ndarray) -> Any:
        """Put an array there: each device gets only its part."""
        return self.fill(array.shape, lambda part: array[part])

    def fill(self, shape: Sequence[int], part: Callable[[tuple[slice, ...]], np.ndarray]) -> Any:
        """Put an array there, part by part."""
        if self.sharding is None:
            array = part((slice(None),) * len(shape))
            return array if self.on_host else jax.device_put(array)
        self.check(shape)
        return jax.make_array_from_callback(
            tuple(shape), self.sharding, lambda index: part(() if index is None else index)
        )

    def check(self, shape: Sequence[int]) -> None:
        """Raise StoreError if the sharding can't cut an array of this shape."""
        if self.sharding is None:
            return
        try:
            self.sharding.shard_shape(tuple(shape))
        except ValueError as error:
            raise StoreError(
                f"{self.name} of shape {list(shape)} can't be sharded by {self.sharding}: {error}"
            ) from error


def find_placements(
    leaves: Sequence[StoredLeaf],
    tensors: Mapping[str, tuple[str, tuple[int, ...]]],
    shardings: Shardings,
) -> dict[str, Placement]:
    """Return where each tensor of these leaves goes.

    Raises:
        StoreError: a tensor has 64 bits and JAX has only 32, or can't be cut so.
    """
    placements = {}
    for leaf in leaves:
        for part, tensor in leaf.tensors.items():
            dtype, shape = tensors[tensor]
            sharding = shardings(leaf, part, shape)
            on_host = leaf.kind == "numpy" and sharding is None
            logical = leaf.about.get("dtype", dtype)
            for given in {dtype, logical} & _WIDE if not on_host else ():
                if jax.dtypes.canonicalize_dtype(given) != np.dtype(given):
                    raise StoreError(
                        f"{leaf.name} is {given}, which JAX has only with "
                        "jax.config.update('jax_enable_x64', True). Switch it on to load it."
                    )
            placement = Placement(tensor, sharding, on_host)
            placement.check(shape)
            placements[tensor] = placement
    return placements


def shardings_of(given: Any, names: Sequence[str]) -> Shardings:
    """Return the shardings that an argument ``sharding`` stands for; see ``load``.

    Raises:
        StoreError: the argument is of another kind, or has a leaf that the file lacks.
    """
    if given is None:
        return lambda leaf, part, shape: None
    if isinstance(given, Sharding):
        return lambda leaf, part, shape: derived(given, leaf, part, shape)
    if callable(given) and jax.tree_util.all_leaves([given]):

        def called(leaf: StoredLeaf, part: str, shape: Sequence[int]) -> Sharding | None:
            found = given(leaf.name)
            if not isinstance(found, Sharding | None):
                raise StoreError(
                    f"sharding({leaf.name!r}) returned {found!r}. It must return a "
                    "jax.sharding.Sharding, or None."
                )
            return None if found is None else derived(found, leaf, part, shape)

        return called
    _, found = named_leaves(given, root="")
    for at in found:
        if not any(_is_within(name, at) for name in names):
            raise StoreError(
                f"sharding has a leaf {at.name!r}, and the file has none of that name: it has "
                f"{', '.join(names)}."
            )
    return lambda leaf, part, shape: _of_tree(found, leaf, part, shape)


def placer(given: Any, names: Sequence[str]) -> Callable[[str, np.ndarray], jax.Array]:
    """Return a function that puts a float parameter of a name where ``sharding`` of ``load`` says.

    Raises:
        StoreError: as ``shardings_of``.
    """
    shardings = shardings_of(given, names)

    def put(name: str, array: np.ndarray) -> jax.Array:
        about = {"shape": list(array.shape), "dtype": array.dtype.name}
        leaf = StoredLeaf(kind="array", about=about, name=name, tensors={"": name})
        return Placement(name, shardings(leaf, "", array.shape)).put(array)

    return put


def _is_within(name: str, at: Leaf) -> bool:
    return at.name in ("", name) or name.startswith(f"{at.name}.")


def _of_tree(
    found: Sequence[Leaf], leaf: StoredLeaf, part: str, shape: Sequence[int]
) -> Sharding | None:
    """Return what a sharding tree, or its prefix, says about a leaf."""
    fits = [at for at in found if _is_within(leaf.name, at)]
    if not fits:
        return None
    value = max(fits, key=lambda at: len(at.name)).value
    if is_whole(value):
        return part_of(value, part)
    if not isinstance(value, Sharding):
        raise StoreError(
            f"sharding has {value!r} for {leaf.name}. Its leaves must be jax.sharding.Shardings."
        )
    return derived(value, leaf, part, shape)


def derived(sharding: Sharding, leaf: StoredLeaf, part: str, shape: Sequence[int]) -> Sharding:
    """Return a part's sharding from that of the represented array.

    Quantized values are cut as the array is. So are scales and zero points along axes whose size
    the cuts divide; along other axes every device has all of them.
    """
    if leaf.kind == CARRIER:
        number, _, part = part.partition(".")
        about = leaf.about["held"][int(number)]["about"]
        if list(about["shape"]) != list(leaf.about["shape"]):
            # A derived weight has other axes than its parameter, whose sharding says nothing then.
            everywhere = isinstance(sharding, NamedSharding)
            return NamedSharding(sharding.mesh, PartitionSpec()) if everywhere else sharding
    if part in ("", "qvalue"):
        return sharding
    if not isinstance(sharding, NamedSharding):
        if sharding.is_fully_replicated:
            return sharding
        raise StoreError(
            f"{leaf.name} has quantized values and scales, whose shardings can't be derived "
            f"from {sharding}. "
            "Give a jax.sharding.NamedSharding, or a sharding for each of its arrays, as in "
            "jax.tree.map(lambda x: x.sharding, stored)."
        )
    whole = leaf.about.get("shape", ())
    is_along = len(shape) == len(whole) + (part == "planes")
    kept = [*followed(sharding, whole, shape).spec] if is_along else []
    while kept and kept[-1] is None:  # shardings whose specs end in None compare as different
        kept.pop()
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))
