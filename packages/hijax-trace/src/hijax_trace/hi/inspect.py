"""Inspect traces and jaxprs with high-level types."""

from __future__ import annotations

from typing import Any

import jax

from .. import compat

typeof = jax.typeof


def requires_low(trace: Any = None) -> bool:
    """Return whether hi primitives are lowered as soon as they are bound.

    Args:
        trace: a JAX trace; by default the current one.

    Returns:
        True outside of all transformations, and while a program is lowered for XLA. False under
        jit, grad, vmap and the like.
    """
    if trace is None:
        trace = compat.current_trace()
    return trace.requires_low


def is_high(jaxpr: Any) -> bool:
    """Return whether a jaxpr has hi types or hi primitives in it.

    Args:
        jaxpr: a ``Jaxpr``, a ``ClosedJaxpr``, or an object with an attribute ``jaxpr``, such as
            the result of ``jit(f).trace``.

    Raises:
        TypeError: it is something else.
    """
    return _jaxpr(jaxpr).is_high


def lower(jaxpr: Any) -> Any:
    """Return the lojax jaxpr of a hi one.

    Args:
        jaxpr: see ``is_high``. A jaxpr that is not high is returned as it is.

    Returns:
        A jaxpr whose inputs are the ``lo_ty()`` of each input of the hi one in turn. Its outputs
        are made in the same way.

    Raises:
        TypeError: ``jaxpr`` is something else.
    """
    jaxpr = _jaxpr(jaxpr)
    return compat.lower_jaxpr(compat.as_closed(jaxpr)) if jaxpr.is_high else jaxpr


def _jaxpr(value: Any) -> Any:
    kinds = (compat.Jaxpr, compat.ClosedJaxpr)
    if not isinstance(value, kinds):
        value = getattr(value, "jaxpr", value)
    if not isinstance(value, kinds):
        raise TypeError(
            f"The argument must be a jaxpr, got {type(value).__name__}. Trace the function first, "
            "by jax.make_jaxpr(f)(*args) or jax.jit(f).trace(*args)."
        )
    return value
