"""Linear maps with custom transposes, under vmap and shard_map."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


@dataclasses.dataclass(frozen=True)
class Axis:
    """The axis that vmap maps."""

    size: int
    name: Any
    spmd_name: Any

    def map(self, function: Callable, in_axes: Any) -> Callable:
        """Return `function` mapped, with results along axis 0."""
        return jax.vmap(
            function,
            in_axes,
            0,
            axis_size=self.size,
            axis_name=self.name,
            spmd_axis_name=self.spmd_name,
        )


class LinearPair:
    """A linear map and its transpose. Subclasses are hashable by value.

    They are mapped example by example, unless they override `batched`.
    """

    def apply(self, turned: bool, residuals: Any, tangent: Any) -> Any:
        """Map a tangent or, if `turned`, apply the transpose to a cotangent."""
        raise NotImplementedError

    def batched(
        self, axis: Axis, residuals: Any, tangents: Any, outs: Any
    ) -> tuple[LinearPair, int]:
        """Return the pair for a whole batch, and the axis that its results are mapped along.

        Of residuals, tangents and results, whether each leaf is mapped (along axis 0), or one for
        all. On the side that is computed all are mapped.
        """
        return _Mapped(self, axis, *map(_frozen, (residuals, tangents, outs))), 0


Frozen = tuple[tuple[bool, ...], Any]


def _frozen(tree: Any) -> Frozen:
    """Return a tree of booleans, hashable."""
    leaves, treedef = jax.tree.flatten(tree)
    return tuple(leaves), treedef


@dataclasses.dataclass(frozen=True)
class _Mapped(LinearPair):
    """A pair that is mapped example by example.

    Cotangents of operands that all examples share are summed.
    """

    pair: LinearPair
    axis: Axis
    residuals: Frozen
    tangents: Frozen
    outs: Frozen

    def apply(self, turned: bool, residuals: Any, tangent: Any) -> Any:
        ins, outs = (self.outs, self.tangents) if turned else (self.tangents, self.outs)
        axes = tuple(
            jax.tree.unflatten(treedef, [0 if mapped else None for mapped in leaves])
            for leaves, treedef in (self.residuals, ins)
        )
        result = self.axis.map(functools.partial(self.pair.apply, turned), axes)(residuals, tangent)
        wanted = jax.tree.unflatten(outs[1], outs[0])
        return jax.tree.map(
            lambda mapped, x: x if mapped else lax.reduce_sum(x, (0,)), wanted, result
        )


def mapped_at_front(
    axis_data: Any, args: Sequence[Any], dims: Sequence[int | None]
) -> tuple[Axis, list[Any], list[bool]]:
    """Return the mapped axis, arguments with it first, and which have it."""
    spmd_name = axis_data.spmd_name or axis_data.explicit_mesh_axis
    axis = Axis(axis_data.size, axis_data.name, spmd_name)
    moved = [
        x if dim is None or dim == 0 else jnp.moveaxis(x, dim, 0)
        for x, dim in zip(args, dims, strict=True)
    ]
    return axis, moved, [dim is not None for dim in dims]


def equally_varying(values: Sequence[Any]) -> list[jax.Array]:
    """Return values that all vary over the same manual axes.

    Manual axes are the mesh axes of a ``shard_map``. JAX's primitives demand that their operands
    vary over the same ones, so each value is cast to those that any of them varies over.
    """
    values = [x if isinstance(x, jax.Array) else jnp.asarray(x) for x in values]
    varying = [_varying(x) for x in values]
    union = frozenset().union(*varying)
    if not union:
        return values
    return [
        x if own == union else lax.pcast(x, tuple(sorted(union - own)), to="varying")
        for x, own in zip(values, varying, strict=True)
    ]


def _varying(x: Any) -> frozenset:
    return frozenset(getattr(getattr(jax.typeof(x), "mat", None), "varying", ()))
