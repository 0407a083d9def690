"""Values with a given derivative."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hijax_trace import HiPrimitive
from quant_numerics._compat import instantiate
from quant_numerics.autodiff.linear import apply_flat, is_nonzero, type_text
from quant_numerics.autodiff.pairs import LinearPair, equally_varying, mapped_at_front


def with_tangent(value: jax.Array, pair: LinearPair, residuals: Any, primals: Any) -> jax.Array:
    """Return `value` with the derivative of a linear pair by `primals`.

    Args:
      value: an array that was computed from the primals.
      pair: forward mode applies its map to a tangent of the primals, reverse mode its transpose.
      residuals: what the pair needs. `value` has no derivative with respect to these, so whatever
        they depend on must be among the primals.
      primals: pytree of float arrays.
    """
    residuals, res_tree = jax.tree.flatten(residuals)
    primals, in_tree = jax.tree.flatten(primals)
    values = equally_varying([value, *residuals, *primals])
    return tangent_p.bind(*values, pair=pair, res_tree=res_tree, in_tree=in_tree)


class _WithTangent(HiPrimitive):
    """The primitive; its operands are value, leaves of residuals, leaves of primals."""

    def is_high(self, *avals: Any, **params: Any) -> bool:
        return False

    def abstract_eval(self, value: Any, *avals: Any, **params: Any) -> Any:
        return value.update(weak_type=False), set()

    def to_lojax(self, value: jax.Array, *args: Any, **params: Any) -> jax.Array:
        return value

    def jvp(self, primals: tuple, tangents: tuple, **params: Any) -> tuple[Any, Any]:
        pair, res_tree, in_tree = (params[name] for name in ("pair", "res_tree", "in_tree"))
        out = self.bind(*primals, **params)
        n = 1 + res_tree.num_leaves
        parts = []
        if is_nonzero(tangents[0]):
            parts.append(tangents[0])
        if any(map(is_nonzero, tangents[n:])):
            dots = [instantiate(t) for t in tangents[n:]]
            (tangent,) = jax.tree.leaves(
                apply_flat(pair, False, res_tree, in_tree, list(primals[1:n]), dots)
            )
            if type_text(tangent) != type_text(out):
                raise TypeError(
                    f"the tangent of {type_text(out)} must be like it, got {type_text(tangent)}. "
                    "Convert what the forward map returns."
                )
            parts.append(tangent)
        if not parts:
            return out, lax.full_like(out, 0)
        return out, parts[0] if len(parts) == 1 else lax.add(*parts)

    def batch(
        self, axis_data: Any, args: tuple, dims: tuple, **params: Any
    ) -> tuple[Any, int | None]:
        if all(dim is None for dim in dims):  # what no example changes must stay unmapped
            return self.bind(*args, **params), None
        pair, res_tree, in_tree = (params[name] for name in ("pair", "res_tree", "in_tree"))
        n = res_tree.num_leaves
        axis, values, flat = mapped_at_front(axis_data, args, dims)
        residuals = jax.tree.unflatten(res_tree, flat[1 : 1 + n])
        ins = jax.tree.unflatten(in_tree, flat[1 + n :])
        batched = pair.batched if any(flat[1:]) else functools.partial(LinearPair.batched, pair)
        pair, out_axis = batched(axis, residuals, ins, True)
        value = values[0]
        if not flat[0]:
            value = lax.broadcast(value, (axis.size,))
        if out_axis:
            value = jnp.moveaxis(value, 0, out_axis)
        values = equally_varying([value, *values[1:]])
        return self.bind(*values, pair=pair, res_tree=res_tree, in_tree=in_tree), out_axis


tangent_p = _WithTangent("with_tangent")
