"""What a trace needs and what a jaxpr holds."""

from __future__ import annotations

from typing import Any

import jax

from .. import compat

typeof = jax.typeof


def requires_low(trace: Any = None) -> bool:
    """Return whether hi primitives are lowered as soon as they are bound.

    Args:
        trace: a JAX trace; the current one by default. Outside of any transformation, and where
            XLA's program is made, this is True. Under jit, grad, vmap and the like it is False.
    """
    if trace is None:
        trace = compat.current_trace()
    return trace.requires_low


def is_high(jaxpr: Any) -> bool:
    """Return whether a jaxpr has hi types or hi primitives in it.

    Args:
        jaxpr: a ``Jaxpr`` or ``ClosedJaxpr``, or anything with a ``jaxpr`` (what ``jit(f).trace``
            returns).

    Raises:
        TypeError: it is none of them.
    """
    return _jaxpr(jaxpr).is_high


def lower(jaxpr: Any) -> Any:
    """Return the lojax jaxpr of a hi one, which computes the same on the lowered values.

    Its inputs are the ``lo_ty()`` of the hi jaxpr's inputs, one after another, and so are its
    outputs. A jaxpr that is not high is returned as it is.
    """
    jaxpr = _jaxpr(jaxpr)
    return compat.lower_jaxpr(compat.as_closed(jaxpr)) if jaxpr.is_high else jaxpr


def _jaxpr(value: Any) -> Any:
    kinds = (compat.Jaxpr, compat.ClosedJaxpr)
    if not isinstance(value, kinds):
        value = getattr(value, "jaxpr", value)
    if not isinstance(value, kinds):
        raise TypeError(
            f"expected a jaxpr, got {type(value).__name__}: trace the function first, by "
            "jax.make_jaxpr(f)(*args) or jax.jit(f).trace(*args)"
        )
    return value
