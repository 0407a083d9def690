"""How ops of independent rows are partitioned: each device calls the kernel on its rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from ._specs import axes_in, spec_of


def partition_rows(
    axes_in_: Sequence[Sequence[str]],
    axes_out: Sequence[Sequence[str]],
    whole: set[str],
    results: Callable[..., Any],
    attributes: dict[str, Any] | Callable[..., dict[str, Any]],
    sums: Sequence[int] = (),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes an op partitionable along all axes but some.

    Args:
        axes_in_: names of the operands' axes. Axes of one name are shared out alike.
        axes_out: of the results' axes.
        whole: names of axes that each device has all of.
        results: of a device, a function of its operands: one, or a tuple of them.
        attributes: of the FFI call; where they aren't the same on each device, a function of its
            operands.
        sums: the numbers of those results that are sums over the axes that they haven't.

    Returns:
        What makes a function of the operands of ``kernel(results, attributes, *operands)``.
    """
    single = len(axes_out) == 1

    def partition(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def on_block(*operands: jax.Array) -> Any:
            some = attributes(*operands) if callable(attributes) else attributes
            return kernel(results(*operands), some, *operands)

        op = custom_partitioning(lambda *operands: on_block(*operands))

        def shardings(mesh: Any, arguments: Any) -> tuple[Any, Any]:
            found: dict[str, Any] = {}
            for names, argument in zip(axes_in_, arguments, strict=True):
                given = spec_of(argument, range(len(names)))
                for name, axes in zip(names, given, strict=True):
                    taken = axes_in(tuple(found.values()))
                    if name not in whole and name not in found and not axes_in((axes,)) & taken:
                        found |= {} if axes is None else {name: axes}

            def of(names: Sequence[str]) -> NamedSharding:
                return NamedSharding(mesh, PartitionSpec(*(found.get(name) for name in names)))

            out = tuple(of(names) for names in axes_out)
            return out[0] if single else out, tuple(of(names) for names in axes_in_)

        def infer(mesh: Any, arguments: Any, result: Any) -> Any:
            return shardings(mesh, arguments)[0]

        def split(mesh: Any, arguments: Any, result: Any) -> Any:
            out, given = shardings(mesh, arguments)
            return mesh, _summed(on_block, given, (out,) if single else out, sums), out, given

        sides = [", ".join(" ".join(names) for names in side) for side in (axes_in_, axes_out)]
        # In the order in which the rule names them.
        order = dict.fromkeys(name for side in (axes_in_, axes_out) for one in side for name in one)
        op.def_partition(
            partition=split,
            infer_sharding_from_operands=infer,
            sharding_rule=" -> ".join(sides),
            need_replication_factors=tuple(name for name in order if name in whole),
        )
        return op

    return partition


def _summed(
    fn: Callable[..., Any], given: Sequence[Any], out: Sequence[Any], sums: Sequence[int]
) -> Callable[..., Any]:
    """Sums some of the results of a device over the mesh axes that only operands are shared by."""
    shared = axes_in(tuple(axis for one in given for axis in one.spec))
    over = {i: tuple(sorted(shared - axes_in(tuple(out[i].spec)))) for i in sums}
    if not any(over.values()):
        return fn

    def summed(*operands: jax.Array) -> tuple[jax.Array, ...]:
        found = enumerate(fn(*operands))
        return tuple(jax.lax.psum(x, over[i]) if over.get(i) else x for i, x in found)

    return summed
