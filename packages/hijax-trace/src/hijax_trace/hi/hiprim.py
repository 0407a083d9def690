"""HiPrim: an operation as a class, an instance per application.

JAX's class is called ``VJPHiPrimitive`` on 0.10.2 and ``HiPrim`` since. This one has the interface
of JAX 0.12 on all versions. It is called with pytrees. JAX's ``custom_vjp`` is made of it.

0.10.2 lacks the rules that follow from another one. Those here compute the primal part again in the
linear part, which is correct, but slower.
"""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from .. import compat

HiPrim = compat.HiPrimBase
"""Base class of operations on hi types and arrays.

A subclass's ``__init__`` sets ``in_avals`` (a tuple of pytrees of types), ``out_aval``, and
``params`` (hashable), then calls ``super().__init__()``. ``expand(*args)`` computes the result.
Optional: ``jvp``; ``vjp_fwd`` with ``vjp_bwd`` or ``vjp_bwd_retval``; ``lin`` with ``linearized``;
``transpose``; ``batch(axis_data, args, dims)``; ``dce(used_outs, live_ins)``;
``remat(trace, *args)``, which returns the result, residuals and ``rem(residuals, *args)``.
"""

Zero = compat.Zero
"""A tangent or cotangent that is known to be zero; ``aval`` is its type.

Derivative rules get one for an operand that isn't differentiated, and may return one.
"""

vmap_rule = compat.vmap_rule
unmap_avals = compat.unmap_avals
bdims_at_front = compat.bdims_at_front


def _is_zero(x: Any) -> bool:
    return isinstance(x, compat.Zero)


def instantiate_zeros(tree: Any) -> Any:
    """Return tangents or cotangents with each symbolic ``Zero`` replaced by its zeros.

    Args:
        tree: a pytree of arrays, hi values and ``Zero``.
    """
    return jax.tree.map(compat.instantiate, tree, is_leaf=_is_zero)


def _transposed(prim: Any, tangent_map: Any, cotangent: Any) -> Any:
    """Return the arguments' cotangents under a linear map of tangents."""
    avals = [aval.to_tangent_aval() for aval in prim.in_avals_flat]
    # Tangents of integers have dtype float0, which a linear map can't take.
    linear = [getattr(aval, "dtype", None) != jax.dtypes.float0 for aval in avals]

    def of_linear(*tangents: Any) -> Any:
        given = iter(tangents)
        flat = [
            next(given) if is_linear else compat.Zero(aval)
            for aval, is_linear in zip(avals, linear, strict=True)
        ]
        return instantiate_zeros(tangent_map(*jax.tree.unflatten(prim.in_tree, flat)))

    zeros = [
        compat.zeros_like_aval(aval)
        for aval, is_linear in zip(avals, linear, strict=True)
        if is_linear
    ]
    results = iter(jax.linear_transpose(of_linear, *zeros)(instantiate_zeros(cotangent)))
    flat = [
        next(results) if is_linear else np.zeros(aval.shape, jax.dtypes.float0)
        for aval, is_linear in zip(avals, linear, strict=True)
    ]
    return jax.tree.unflatten(prim.in_tree, flat)


def _lin(self: Any, nzs_in: Any, *primals: Any) -> Any:
    return self(*primals), primals


def _linearized(self: Any, primals: Any, *tangents: Any) -> Any:
    return instantiate_zeros(self.jvp(primals, tuple(map(instantiate_zeros, tangents)))[1])


def _vjp_bwd_from_jvp(self: Any, primals: Any, cotangent: Any) -> Any:
    return _transposed(self, lambda *tangents: self.jvp(primals, tangents)[1], cotangent)


def _vjp_fwd_from_lin(self: Any, nzs_in: Any, *primals: Any) -> Any:
    out, residuals, *_ = self.lin(nzs_in, *primals)
    return out, residuals


def _vjp_bwd_from_lin(self: Any, residuals: Any, cotangent: Any) -> Any:
    return _transposed(self, lambda *tangents: self.linearized(residuals, *tangents), cotangent)


def _jvp_from_lin(self: Any, primals: Any, tangents: Any) -> Any:
    """Compute ``jvp`` of a HiPrim by its ``lin`` and ``linearized``.

    Args:
        primals: the operands.
        tangents: their tangents, some of which may be a symbolic ``Zero``.

    Returns:
        The result and its tangent.

    Raises:
        TypeError: ``lin`` is derived from ``jvp``.
    """
    if type(self).lin is _lin:
        raise TypeError(
            "One of `jvp` and `lin` must be defined by the class, got `jvp = jvp_from_lin` and "
            f"`lin, linearized = linearize_from_jvp` in {type(self)}, which can't set both. Write "
            "one of the two rules."
        )
    nzs_in = jax.tree.map(lambda t: not _is_zero(t), tangents, is_leaf=_is_zero)
    out, residuals, *_ = self.lin(nzs_in, *primals)
    return out, self.linearized(residuals, *map(instantiate_zeros, tangents))


linearize_from_jvp = compat.native_rule("linearize_from_jvp") or (_lin, _linearized)
vjp_from_jvp = compat.native_rule("vjp_from_jvp") or (_lin, _vjp_bwd_from_jvp)
vjp_from_lin = compat.native_rule("vjp_from_lin") or (_vjp_fwd_from_lin, _vjp_bwd_from_lin)
jvp_from_lin = compat.native_rule("jvp_from_lin") or _jvp_from_lin
