"""Linear maps with custom transposes, and values with such a map as their derivative.

Such a map is one primitive, which stays whole in jaxprs until it is lowered. Autodiff and vmap ask
its `LinearPair` what to do, and never look inside the functions. Derivatives straight through a
function need no such map.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from hijax_trace import HiPrimitive
from quant_numerics._compat import Zero, instantiate, is_undefined_primal


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


def apply_flat(
    pair: LinearPair, turned: bool, res_tree: Any, in_tree: Any, residuals: list, ins: list
) -> Any:
    """Apply a pair's map, or if `turned` its transpose, to leaves, as one operation.

    The map is taken to be linear in `ins`. Where it is transposed, as reverse mode does, the pair's
    transpose runs instead of the true one: it may be quantized. A derivative with respect to
    `residuals` is that of the map. Works under jit, grad, jvp (of any order), vmap, scan, remat and
    shard_map.
    """
    values = equally_varying([*residuals, *ins])
    avals = [jax.typeof(x) for x in values]
    out_tree = _types(pair, turned, res_tree, in_tree, avals)[1]
    out = linear_p.bind(
        *values, pair=pair, turned=turned, res_tree=res_tree, in_tree=in_tree, out_tree=out_tree
    )
    return jax.tree.unflatten(out_tree, out)


@functools.partial(jax.jit, static_argnums=(0, 1), inline=True)
def _computed(pair: LinearPair, turned: bool, residuals: Any, tangent: Any) -> Any:
    """Compute the map, jitted so that equal pairs are traced once."""
    return pair.apply(turned, residuals, tangent)


def _types(
    pair: LinearPair, turned: bool, res_tree: Any, in_tree: Any, avals: Sequence[Any]
) -> tuple[list[Any], Any]:
    """Return the types of the results, and their tree."""
    n = res_tree.num_leaves
    residuals = jax.tree.unflatten(res_tree, avals[:n])
    tangent = jax.tree.unflatten(in_tree, avals[n:])
    traced = _computed.trace(pair, turned, residuals, tangent)
    out_avals = [aval.update(weak_type=False) for aval in traced.jaxpr.out_avals]
    return out_avals, jax.tree.structure(traced.out_info)


class _Linear(HiPrimitive):
    """The primitive; its operands are the leaves of residuals, then of tangent."""

    multiple_results = True

    def is_high(self, *avals: Any, **params: Any) -> bool:
        return False

    def abstract_eval(self, *avals: Any, pair, turned, res_tree, in_tree, out_tree) -> Any:
        return _types(pair, turned, res_tree, in_tree, avals)[0], set()

    def to_lojax(self, *args: Any, pair, turned, res_tree, in_tree, out_tree) -> list[jax.Array]:
        n = res_tree.num_leaves
        residuals = jax.tree.unflatten(res_tree, args[:n])
        tangent = jax.tree.unflatten(in_tree, args[n:])
        return jax.tree.leaves(_computed(pair, turned, residuals, tangent))

    def jvp(self, primals: tuple, tangents: tuple, **params: Any) -> tuple[Any, Any]:
        n = params["res_tree"].num_leaves
        out = self.bind(*primals, **params)
        parts = []
        if any(map(is_nonzero, tangents[n:])):
            ins = [instantiate(t) for t in tangents[n:]]
            parts.append(self.bind(*equally_varying([*primals[:n], *ins]), **params))
        if active := [i for i in range(n) if is_nonzero(tangents[i])]:
            parts.append(_residual_tangent(primals, tangents, active, out, **params))
        if not parts:
            return out, [lax.full_like(x, 0) for x in out]
        return out, parts[0] if len(parts) == 1 else list(map(lax.add, *parts))

    def transpose(
        self, cotangents: Any, *args: Any, pair, turned, res_tree, in_tree, out_tree
    ) -> list[Any]:
        n = res_tree.num_leaves
        if not any(map(is_nonzero, cotangents)):
            return [None] * len(args)
        cts = [instantiate(ct) for ct in cotangents]
        result = apply_flat(pair, not turned, res_tree, out_tree, list(args[:n]), cts)
        leaves, tree = jax.tree.flatten(result)
        wanted = [x.aval if is_undefined_primal(x) else jax.typeof(x) for x in args[n:]]
        if tree != in_tree or [type_text(x) for x in leaves] != [type_text(x) for x in wanted]:
            raise TypeError(
                "the result of a pair's transpose must be like the tangent, "
                f"{jax.tree.unflatten(in_tree, [type_text(x) for x in wanted])}, got "
                f"{jax.tree.unflatten(tree, [type_text(x) for x in leaves])}. Reshape or convert "
                "it."
            )
        used = (x if is_undefined_primal(a) else None for x, a in zip(leaves, args[n:]))  # noqa: B905
        return [None] * n + list(used)

    def batch(self, axis_data: Any, args: tuple, dims: tuple, **params: Any) -> tuple[list, list]:
        if all(dim is None for dim in dims):  # what no example changes must stay unmapped
            results = self.bind(*args, **params)
            return results, [None] * len(results)
        pair, turned = params["pair"], params["turned"]
        res_tree, in_tree, out_tree = (params[f"{kind}_tree"] for kind in ("res", "in", "out"))
        n = res_tree.num_leaves
        axis, values, flat = mapped_at_front(axis_data, args, dims)
        residuals = jax.tree.unflatten(res_tree, flat[:n])
        ins = jax.tree.unflatten(in_tree, flat[n:])
        outs = jax.tree.unflatten(out_tree, [True] * out_tree.num_leaves)
        ends = (outs, ins) if turned else (ins, outs)
        whole, out_axis = pair.batched(axis, residuals, *ends)
        if turned and out_axis:  # cotangents come where the batched forward map puts results
            values[n:] = [
                jnp.moveaxis(x, 0, out_axis) if mapped else x
                for x, mapped in zip(values[n:], flat[n:], strict=True)
            ]
        out = apply_flat(whole, turned, res_tree, in_tree, values[:n], values[n:])
        leaves = jax.tree.leaves(out)
        return leaves, [0 if turned else out_axis] * len(leaves)


linear_p = _Linear("linear_with_transpose")


def _residual_tangent(
    primals: tuple,
    tangents: tuple,
    active: list[int],
    out: list[Any],
    *,
    pair: LinearPair,
    turned: bool,
    res_tree: Any,
    in_tree: Any,
    out_tree: Any,
) -> list[jax.Array]:
    """Return the tangent of a linear map that its residuals cause."""
    n = res_tree.num_leaves

    def of_residuals(*values: jax.Array) -> list[jax.Array]:
        flat = list(primals[:n])
        for i, value in zip(active, values, strict=True):
            flat[i] = value
        residuals = jax.tree.unflatten(res_tree, flat)
        given = jax.tree.unflatten(in_tree, primals[n:])
        if not turned:
            return jax.tree.leaves(pair.apply(False, residuals, given))
        # The given transpose may round, so that its derivative is zero. That of the true one is
        # meant.
        zeros = equally_varying([*map(jnp.zeros_like, out), *primals])[: len(out)]
        at = jax.tree.unflatten(out_tree, zeros)
        return jax.tree.leaves(jax.vjp(lambda t: pair.apply(False, residuals, t), at)[1](given)[0])

    values = tuple(primals[i] for i in active)
    dots = equally_varying([*(tangents[i] for i in active), *primals])[: len(active)]
    return jax.jvp(of_residuals, values, tuple(dots))[1]


def is_nonzero(tangent: Any) -> bool:
    """Return whether a tangent is not known to be zero."""
    if isinstance(tangent, Zero):
        return False
    return jnp.result_type(tangent) != jax.dtypes.float0


def type_text(x: Any) -> str:
    """Return dtype and shape, for messages and for comparing them."""
    return f"{jnp.dtype(x.dtype).name}{list(x.shape)}"


def with_tangent(value: jax.Array, pair: LinearPair, residuals: Any, primals: Any) -> jax.Array:
    """Return `value` with the derivative of a linear pair by `primals`, a tree of float arrays.

    Forward mode applies the pair's map to a tangent of the primals, reverse mode its transpose.
    `value` has no derivative by `residuals`, so what they depend on must be among the primals.
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


def straight_through(
    quantized_fn: Callable[..., Any], float_fn: Callable[..., Any]
) -> Callable[..., Any]:
    """Return one function with the derivative of another.

    ``f(*args)`` equals ``quantized_fn(*args)``; its JVP, and so its gradients of any order and
    mode, is that of ``float_fn`` at the same arguments. Rounding has derivative zero almost
    everywhere; with ``float_fn`` the unquantized op this is the straight-through estimator of
    Bengio et al. 2013 (arXiv:1308.3432). Works under jit, grad, jvp, vmap, scan and remat.

    Args:
      quantized_fn: positional array (or pytree) arguments -> arrays.
      float_fn: takes the same arguments; returns the same tree of shapes and dtypes. It is
        evaluated only where a derivative is taken. Close over static options in both.

    Returns:
      A function of positional arguments.

    Raises:
      ValueError: when it is differentiated: the two functions return different trees, shapes or
        dtypes.
    """

    @jax.custom_jvp
    def apply(*args: Any) -> Any:
        return quantized_fn(*args)

    @apply.defjvp
    def rule(primals: tuple[Any, ...], tangents: tuple[Any, ...]) -> tuple[Any, Any]:
        out = apply(*primals)  # not quantized_fn: higher derivatives go straight through too
        float_out, tangent = jax.jvp(float_fn, primals, tangents)
        ours, theirs = _signature(out), _signature(float_out)
        if ours != theirs:
            raise ValueError(
                "the outputs of the two functions of straight_through must be alike, got "
                f"{ours} of quantized_fn and {theirs} of float_fn. Give both the same "
                "preferred_element_type, or convert the result of one."
            )
        return out, tangent

    return apply


def on_platforms(plain: Callable[..., Any], *operands: Any, **others: Callable[..., Any]) -> Any:
    """Return ``plain(*operands)``, in programs for some platforms by another function.

    The others have the same result and need no derivatives, as kernels have none: theirs are those
    of `plain`.
    """

    def either(*operands: Any) -> Any:
        return lax.platform_dependent(*operands, default=plain, **others)

    return straight_through(either, plain)(*operands)


def _signature(tree: Any) -> tuple[str, list[str]]:
    leaves, structure = jax.tree.flatten(tree)
    return str(structure), [f"{x.dtype.name}{list(x.shape)}" for x in map(jnp.asarray, leaves)]
