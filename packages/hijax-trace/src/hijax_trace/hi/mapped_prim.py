"""MappedPrim: a HiPrim under ``vmap``, made by mapping each of its rules.

A HiPrim's ``batch`` rule makes another instance of its class, without the expansion that an engine
gave the first instance. This class keeps the first instance.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from .. import compat


def _is_none(x: Any) -> bool:
    return x is None


@jax.tree_util.register_static
@dataclass(frozen=True)
class _Axes:
    """The mapped axes of residuals, as a static part of the residuals."""

    leaves: tuple[Any, ...]
    treedef: Any

    @classmethod
    def of(cls, tree: Any) -> _Axes:
        """Return the axes in a pytree."""
        leaves, treedef = jax.tree.flatten(tree, is_leaf=_is_none)
        return cls(tuple(leaves), treedef)

    def tree(self) -> Any:
        """Return the axes as a pytree."""
        return jax.tree.unflatten(self.treedef, self.leaves)


def mapped(prim: Any, axis_data: Any, args: Any, dims: Any) -> tuple[Any, Any]:
    """Return the results of a HiPrim under ``vmap``, and their mapped axes."""
    if not jax.tree.leaves(dims):
        # JAX asks for the rule even if no operand is mapped, and so must not be the result: the
        # value beside a tangent, for jacfwd.
        return prim(*args), jax.tree.map(lambda aval: None, prim.out_aval)
    again = MappedPrim(prim, axis_data, dims)
    return again(*args), again.out_dims


class MappedPrim(compat.HiPrimBase):
    """A HiPrim of whole batches."""

    prim: Any
    axis_data: Any
    dims: Any
    out_dims: Any

    def __init__(self, prim: Any, axis_data: Any, dims: Any):
        out_dims = jax.tree.map(lambda aval: aval.leading_axis_spec(), prim.out_aval)
        self.in_avals = compat.unmap_avals(axis_data, prim.in_avals, dims)
        self.out_aval = compat.unmap_avals(axis_data, prim.out_aval, out_dims)
        self.effects = prim.effects
        axes = (_Axes.of(dims), _Axes.of(out_dims))
        self.params = {"prim": prim, "axis_data": axis_data, "axes": axes}
        super().__init__()
        self.dims, self.out_dims = dims, out_dims

    def _map(self, fn: Callable[..., Any], ins: Any, outs: Any, sums: bool = False) -> Any:
        return compat.vmap_rule(self.axis_data, fn, ins, outs, sum_match=sums)

    def expand(self, *args: Any) -> Any:
        return self._map(self.prim.expand, self.dims, self.out_dims)(*args)

    def jvp(self, primals: Any, tangents: Any) -> Any:
        ins, outs = (self.dims, self.dims), (self.out_dims, self.out_dims)
        return self._map(self.prim.jvp, ins, outs)(primals, tangents)

    def lin(self, nzs_in: Any, *primals: Any) -> Any:
        return self._forward(self.prim.lin, nzs_in, primals)

    def vjp_fwd(self, nzs_in: Any, *primals: Any) -> Any:
        return self._forward(self.prim.vjp_fwd, nzs_in, primals)

    def _forward(self, rule: Callable[..., Any], nzs_in: Any, primals: Any) -> Any:
        nzs_out: tuple[Any, ...] = ()

        def one(*primals: Any) -> Any:
            nonlocal nzs_out
            out, residuals, *rest = rule(nzs_in, *primals)
            # Structured residuals, if there are any, are mapped with the others.
            nzs_out, structured = tuple(rest[:1]), tuple(rest[1:])
            return out, (residuals, *structured)

        outs = (self.out_dims, compat.INFERRED)
        (out, residuals), (_, axes) = self._map(one, self.dims, outs)(*primals)
        return out, (residuals, _Axes.of(axes)), *nzs_out

    def linearized(self, residuals: Any, *tangents: Any) -> Any:
        values, axes = residuals

        def one(values: Any, *tangents: Any) -> Any:
            return self.prim.linearized(*values, *tangents)

        return self._map(one, (axes.tree(), *self.dims), self.out_dims)(values, *tangents)

    def vjp_bwd(self, residuals: Any, outgrad: Any, /, *arg_accums: Any) -> None:
        values, axes = residuals

        def one(values: Any, outgrad: Any) -> Any:
            return compat.cotangents(self.prim, values, outgrad)

        ins = (axes.tree(), self.out_dims)
        found = self._map(one, ins, self._summed(), sums=True)(values, outgrad)
        compat.accumulate(arg_accums, found)

    def transpose(self, out_ct: Any, *maybe_accums: Any) -> None:
        leaves, treedef = jax.tree.flatten(maybe_accums)
        linear = [compat.is_accumulator(leaf) for leaf in leaves]
        dims = treedef.flatten_up_to(self.dims)
        summed = treedef.flatten_up_to(self._summed())

        def one(out_ct: Any, *given: Any) -> Any:
            rest = iter(given)
            avals = self.prim.in_avals_flat
            inner = [
                compat.accumulator(aval) if is_linear else next(rest)
                for aval, is_linear in zip(avals, linear, strict=True)
            ]
            self.prim.transpose(out_ct, *jax.tree.unflatten(treedef, inner))
            return [x.freeze() for x, is_linear in zip(inner, linear, strict=True) if is_linear]

        def pick(found: list[Any], is_linear: bool) -> list[Any]:
            return [x for x, kind in zip(found, linear, strict=True) if kind is is_linear]

        ins = (self.out_dims, *pick(dims, is_linear=False))
        run = self._map(one, ins, pick(summed, is_linear=True), sums=True)
        found = run(out_ct, *pick(leaves, is_linear=False))
        compat.accumulate(pick(leaves, is_linear=True), found)

    def _summed(self) -> Any:
        """Return the axes of the operands' cotangents, summed for unmapped operands."""

        def axis(dim: Any) -> Any:
            return compat.SUMMED if dim is None else dim

        return jax.tree.map(axis, self.dims, is_leaf=_is_none)

    def batch(self, axis_data: Any, args: Any, dims: Any) -> Any:
        return mapped(self, axis_data, args, dims)
