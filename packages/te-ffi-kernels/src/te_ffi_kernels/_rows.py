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
    attributes: dict[str, Any],
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes an op partitionable along all axes but some.

    Args:
        axes_in_: names of the operands' axes. Axes of one name are shared out alike.
        axes_out: of the results' axes.
        whole: names of axes that each device has all of.
        results: of a device, a function of its operands: one, or a tuple of them.
        attributes: of the FFI call, the same on each device.

    Returns:
        What makes a function of the operands of ``kernel(results, attributes, *operands)``.
    """
    single = len(axes_out) == 1

    def partition(kernel: Callable[..., Any]) -> Callable[..., Any]:
        def on_block(*operands: jax.Array) -> Any:
            return kernel(results(*operands), attributes, *operands)

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
            return mesh, on_block, out, given

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
