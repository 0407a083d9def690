"""How a product with a packed weight is partitioned: each device calls the kernel on its block."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import NamedSharding, PartitionSpec

from .._specs import axes_in, spec_of
from .form import Form


def partition_product(form: Form, kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make a product partitionable along the rows of x and along panels.

    Panels can be shared out where all of them are full, since a device computes whole panels. What
    is contracted is gathered, and so are the weights of a stack, and rows that come in groups.

    Args:
        form: of the product.
        kernel: called as ``kernel(results, attributes, *operands)``.

    Returns:
        The product of ``x[m, k]`` and ``buffer[panels, bytes]``; or of ``x``, ``stack[weights,
        panels, bytes]``, and ``index[]`` or ``group_sizes[weights]``.
    """
    layout, n, dtype = form.layout, form.n, form.dtype
    stacked, grouped = bool(form.picks), form.picks == "groups"
    by_panels = n % layout.columns == 0
    axis = 1 if stacked else 0  # of panels

    def block(columns: int, *operands: jax.Array) -> jax.Array:
        results = jax.ShapeDtypeStruct((operands[0].shape[0], columns), dtype)
        attributes = {"k": layout.k, "n": columns, **layout.attributes}
        return kernel(results, attributes, *operands)

    product = custom_partitioning(lambda *operands: block(n, *operands))

    def specs(arguments: Any) -> tuple[Any, Any]:
        """Return the mesh axes that rows and panels are shared out over."""
        (rows,), (panels,) = spec_of(arguments[0], (0,)), spec_of(arguments[1], (axis,))
        if not by_panels or axes_in([rows]) & axes_in([panels]):
            panels = None
        return None if grouped else rows, panels

    def shardings(mesh: Any, arguments: Any) -> tuple[Any, tuple[Any, ...]]:
        rows, panels = specs(arguments)
        last = (None,) if grouped else ()
        given = [(rows, None), (None, panels, None), last] if stacked else [(rows, None), (panels,)]
        out = NamedSharding(mesh, PartitionSpec(rows, panels))
        return out, tuple(NamedSharding(mesh, PartitionSpec(*spec)) for spec in given)

    def infer(mesh: Any, arguments: Any, result: Any) -> Any:
        return shardings(mesh, arguments)[0]

    def partition(mesh: Any, arguments: Any, result: Any) -> Any:
        out, given = shardings(mesh, arguments)

        def on_block(*operands: jax.Array) -> jax.Array:
            shared_out = out.spec[1] is not None
            columns = layout.columns * operands[1].shape[axis] if shared_out else n
            return block(columns, *operands)

        return mesh, on_block, out, given

    # One factor for the panels, and one for the columns of a panel.
    buffer = "l p b, l" if grouped else "l p b, " if stacked else "p b"
    columns = "(p c)" if by_panels else "n"
    whole = (
        *(["m"] if grouped else []),
        "k",
        *(["l"] if stacked else []),
        *(["b", "c"] if by_panels else ["p", "b", "n"]),
    )
    product.def_partition(
        partition=partition,
        infer_sharding_from_operands=infer,
        sharding_rule=f"m k, {buffer} -> m {columns}",
        # In the order in which the rule names them.
        need_replication_factors=whole,
        **({"c": layout.columns} if by_panels else {}),
    )
    return product
