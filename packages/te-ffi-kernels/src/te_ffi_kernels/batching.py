"""Rules of ops for vmap."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap


def with_rule(
    fn: Callable[..., Any], rule: Callable[..., tuple[Any, Any]] | None
) -> Callable[..., Any]:
    """Return a function with a rule for ``vmap``.

    Args:
        fn: a function of arrays.
        rule: as for ``custom_vmap``. Without one, and where it returns NotImplemented, ``vmap``
            loops over the indices of the mapped axis.
    """
    wrapped = custom_vmap(fn)

    def one_by_one(in_batched: Sequence[bool], *operands: jax.Array) -> tuple[Any, Any]:
        mapped = [x for x, flag in zip(operands, in_batched, strict=True) if flag]

        def body(given: list[jax.Array]) -> Any:
            rest = iter(given)
            return wrapped(
                *(next(rest) if flag else x for x, flag in zip(operands, in_batched, strict=True))
            )

        out = lax.map(body, mapped)
        return out, jax.tree.map(lambda _: True, out)

    def batch(size: int, in_batched: Sequence[bool], *operands: jax.Array) -> tuple[Any, Any]:
        found = NotImplemented if rule is None else rule(size, tuple(in_batched), *operands)
        return one_by_one(in_batched, *operands) if found is NotImplemented else found

    wrapped.def_vmap(batch)
    return wrapped


def more_rows(run: Any, config: Any, size: int, in_batched: Sequence[bool], *operands: Any) -> Any:
    """Run an op with the mapped axis in front of all operands."""
    found = run(config, *widened(size, in_batched, *operands))
    return found, jax.tree.map(lambda _: True, found)


def widened(size: int, in_batched: Sequence[bool], *operands: jax.Array) -> list[jax.Array]:
    """Return the operands, those that have no mapped axis repeated along one."""
    return [
        one if flag else jnp.broadcast_to(one, (size, *one.shape))
        for one, flag in zip(operands, in_batched, strict=True)
    ]
