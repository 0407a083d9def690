"""HiPrim: an operation as a class, an instance per application.

JAX's class is called ``VJPHiPrimitive`` on 0.10.2 and ``HiPrim`` since. This one has the interface
of JAX 0.12 on all versions. It is called with pytrees. JAX's ``custom_vjp`` is made of it.
"""

from __future__ import annotations

from .. import compat
from . import rules

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
instantiate_zeros = rules.instantiate_zeros

vmap_rule = compat.vmap_rule
unmap_avals = compat.unmap_avals
bdims_at_front = compat.bdims_at_front

linearize_from_jvp = compat.native_rule("linearize_from_jvp") or rules.LINEARIZE_FROM_JVP
vjp_from_jvp = compat.native_rule("vjp_from_jvp") or rules.VJP_FROM_JVP
vjp_from_lin = compat.native_rule("vjp_from_lin") or rules.VJP_FROM_LIN
jvp_from_lin = compat.native_rule("jvp_from_lin") or rules.jvp_from_lin
