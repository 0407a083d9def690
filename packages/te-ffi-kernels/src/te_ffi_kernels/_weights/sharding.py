"""How a product with a packed weight is partitioned: each device calls the kernel on its block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .._specs import axes_in, spec_of
from .layout import COLUMNS


def partition_product(
    shape: tuple[int, int, int], dtype: Any, kernel: Callable[..., jax.Array]
) -> Callable[[jax.Array, jax.Array], jax.Array]:
    """Makes a product partitionable along the rows of x and along panels.

    Panels can be shared out where all of them are full, since a device computes 16 columns for
    each. What is contracted is gathered.

    Args:
        shape: k, n and group of the weight.
        dtype: of the result.
        kernel: called as ``kernel(results, attributes, x, buffer)``.

    Returns:
        The product of ``x[m, k]`` and ``buffer[panels, bytes]``.
    """
    k, n, group = shape
    by_panels = n % COLUMNS == 0

    @custom_partitioning
    def product(x: jax.Array, buffer: jax.Array) -> jax.Array:
        return block(n, x, buffer)

    def block(columns: int, x: jax.Array, buffer: jax.Array) -> jax.Array:
        results = jax.ShapeDtypeStruct((x.shape[0], columns), dtype)
        return kernel(results, {"k": k, "n": columns, "group": group}, x, buffer)

    def specs(arguments: Any) -> tuple[Any, Any]:
        """The mesh axes that rows and panels are shared out over."""
        (rows,), (panels,) = (spec_of(argument, (0,)) for argument in arguments)
        if not by_panels or axes_in([rows]) & axes_in([panels]):
            panels = None
        return rows, panels

    def shardings(mesh: Any, arguments: Any) -> tuple[Any, tuple[Any, Any]]:
        rows, panels = specs(arguments)
        out = NamedSharding(mesh, PartitionSpec(rows, panels))
        return out, (
            NamedSharding(mesh, PartitionSpec(rows, None)),
            NamedSharding(mesh, PartitionSpec(panels, None)),
        )

    def infer(mesh: Any, arguments: Any, result: Any) -> Any:
        return shardings(mesh, arguments)[0]

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        out, given = shardings(mesh, arguments)

        def on_block(x: jax.Array, buffer: jax.Array) -> jax.Array:
            shared_out = given[1].spec[0] is not None
            return block(COLUMNS * buffer.shape[0] if shared_out else n, x, buffer)

        return mesh, on_block, out, given

    product.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        # One factor for the panels, and one for the columns of a panel.
        sharding_rule="m k, p b -> m (p c)" if by_panels else "m k, p b -> m n",
        # In the order in which the rule names them.
        need_replication_factors=("k", "b", "c") if by_panels else ("k", "p", "b", "n"),
        **({"c": COLUMNS} if by_panels else {}),
    )
    return product
