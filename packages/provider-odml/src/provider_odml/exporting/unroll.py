"""Loops and branches at export: LiteRT has no quantized loop of rolled layers, so that they are
written out; and its IF computes something else than was converted, so that all branches of a cond
are computed, and one result is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from interception_core import Interceptor, OpCall, PatchEngine, untapped

from ..capture import module_calls
from ..capture.ops import is_float


def unrolled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``fn`` with its scans and fixed loops written out.

    Step i of ``scan(body)`` is under the name scope ``scan(body)[i]``: its operations have the
    ids that they had in the rolled scan, but for that. So it is with branches, which are all
    computed, and ``cond(branch)[if]``: see ``BRANCH``.
    """
    handlers = {
        "jax.lax.scan": _scan,
        "jax.lax.fori_loop": _fori_loop,
        "jax.lax.cond": _cond,
        "jax.lax.switch": _switch,
    }
    interceptor = Interceptor(handlers, key="odml unroll", path_key=module_calls.anywhere)
    return PatchEngine().wrap(fn, interceptor)


BRANCH = "[if]"
"""Ends the name scope of a branch."""


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
    for place, i in enumerate(steps):
        with jax.named_scope(f"fori_loop({_name(body_fun)})[{place}]"):
            value = step(i, _between(value))
    return _between(value)


def _cond(
    call: OpCall,
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    **options: Any,
) -> Any:
    if options:
        return NotImplemented
    # In the order that JAX has them in.
    index = jnp.asarray(pred).astype(bool).astype(jnp.int32)
    return _taken("cond", index, (false_fun, true_fun), operands)


def _switch(
    call: OpCall,
    index: Any,
    branches: Sequence[Callable[..., Any]],
    *operands: Any,
    **options: Any,
) -> Any:
    if options:
        return NotImplemented
    index = jnp.clip(jnp.asarray(index), 0, len(branches) - 1).astype(jnp.int32)
    return _taken("switch", index, branches, operands)


def _taken(kind: str, index: jax.Array, branches: Sequence[Any], operands: Any) -> Any:
    """Return the result of one of several computed branches."""
    found = []
    for branch in branches:
        with jax.named_scope(f"{kind}({_name(branch)}){BRANCH}"):
            found.append(unrolled(branch)(*operands))
    return jax.tree.map(lambda *results: _one_of(index, results), *found)


def _one_of(index: jax.Array, results: Sequence[Any]) -> jax.Array:
    results = [jnp.asarray(one) for one in results]
    if is_float(results[0]):
        return module_calls.branch_value(index, *results)
    # Integers don't have a range.
    return untapped(module_calls.branch_value)(index, *results)


def _name(f: Callable[..., Any]) -> str:
    return getattr(f, "__name__", type(f).__name__)


def _between(carry: Any) -> Any:
    # Looked up at each call: it is tapped there.
    return jax.tree.map(lambda x: module_calls.loop_value(x) if is_float(x) else x, carry)
