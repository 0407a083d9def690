"""Loops at export: LiteRT has no quantized loop of rolled layers, so that they are written out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from interception_core import Interceptor, OpCall, PatchEngine

from .. import _marks
from .._ops import is_float


def unrolled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Returns ``fn`` with the steps of its scans, and of its loops of known length, written out.

    Step i of ``scan(body)`` is under the name scope ``scan(body)[i]``: its operations have the
    ids that they had in the rolled scan, but for that.
    """
    handlers = {"jax.lax.scan": _scan, "jax.lax.fori_loop": _fori_loop}
    interceptor = Interceptor(handlers, key="odml unroll", path_key=_marks.anywhere)
    return PatchEngine().wrap(fn, interceptor)


def _scan(
    call: OpCall,
    f: Callable[..., Any],
    init: Any,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    **options: Any,
) -> Any:
    leaves = jax.tree.leaves(xs)
    count = leaves[0].shape[0] if leaves else length
    if not count:
        return NotImplemented
    carry, found, step = init, [], unrolled(f)
    for i in reversed(range(count)) if reverse else range(count):
        with jax.named_scope(f"scan({_name(f)})[{i}]"):
            carry, y = step(_between(carry), jax.tree.map(lambda x, i=i: jnp.asarray(x)[i], xs))
        found.append(y)
    if reverse:
        found.reverse()
    return _between(carry), jax.tree.map(lambda *ys: jnp.stack(ys), *found)


def _fori_loop(
    call: OpCall,
    lower: Any,
    upper: Any,
    body_fun: Callable[..., Any],
    init_val: Any,
    **options: Any,
) -> Any:
    try:
        steps = range(int(lower), int(upper))
    except (TypeError, jax.errors.ConcretizationTypeError):
        return NotImplemented
    value, step = init_val, unrolled(body_fun)
    for i in steps:
        with jax.named_scope(f"fori_loop({_name(body_fun)})[{i}]"):
            value = step(i, _between(value))
    return _between(value)


def _name(f: Callable[..., Any]) -> str:
    return getattr(f, "__name__", type(f).__name__)


def _between(carry: Any) -> Any:
    # Looked up at each call: it is tapped there.
    return jax.tree.map(lambda x: _marks.loop_value(x) if is_float(x) else x, carry)
