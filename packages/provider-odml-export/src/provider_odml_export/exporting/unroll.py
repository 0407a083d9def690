"""Loops and branches at export: LiteRT has no quantized loop of rolled layers, so that they are
written out; and its IF computes something else than was converted, so that all branches of a cond
are computed, and one result is taken."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from interception_core import Interceptor, OpCall, PatchEngine, untapped
from provider_odml.features import is_float, module_calls

from .._compat import label_of
from ..forms import wall


def unrolled(fn: Callable[..., Any], loops: bool = True) -> Callable[..., Any]:
    """Return ``fn`` with its scans, fixed loops and branches written out.

    Step i of ``scan(body)`` is under the name scope ``scan(body)[i]``, of another loop of that name
    under ``scan(body)~1[i]``. So it is with branches, which are all computed, and
    ``cond(branch)[if]``: see ``BRANCH``. Nothing else is added to what is tapped, so that the calls
    of a step are those of the loop: ``written_out`` relies on it.

    Args:
        fn: the function.
        loops: whether loops are written out; or branches alone, where JAX runs loops step by step.
    """
    handlers: dict[str, Any] = {
        "jax.lax.cond": functools.partial(_cond, loops),
        "jax.lax.switch": functools.partial(_switch, loops),
    }
    if loops:
        # A fori_loop whose bounds are known, and a map, call it.
        handlers["jax.lax.scan"] = _scan
    key = ("odml unroll", loops)
    interceptor = Interceptor(handlers, key=key, path_key=module_calls.anywhere)
    return PatchEngine().wrap(fn, interceptor)


BRANCH = "[if]"
"""Ends the name scope of a branch."""
NEVER = "[never]"
"""Ends that of a branch that no data can take."""

_STEP = re.compile(r"(?<=\))(?P<which>(?:~\d+)?)\[(?P<step>\d+|if|never)\]$")


def scopes_of_steps(path: str) -> tuple[str, tuple[int, ...]]:
    """Return a module path without the scopes of steps and branches, and the steps' numbers."""
    others, steps = [], []
    for scope in path.split("/"):
        step = _STEP.search(scope)
        if step is None:
            others.append(scope)
        elif step["step"].isdigit():
            steps.append(int(step["step"]))
    return "/".join(others), tuple(steps)


def first_step(path: str) -> str:
    """Return a module path as it is in the first step of each loop."""
    scopes = path.split("/")

    def first(scope: str) -> str:
        is_branch = scope.endswith((BRANCH, NEVER))
        return scope if is_branch else _STEP.sub(r"\g<which>[0]", scope)

    return "/".join(map(first, scopes))


def _which(call: OpCall, of: int = 1, i: int = 0) -> str:
    """Return what tells apart loops or branches of one name: equal steps would be one place.

    Args:
        call: of the loop, or of the choice.
        of: how many branches of this name the choice has.
        i: which one of them it is.
    """
    number = int(call.op_id.rpartition(":")[2]) * of + i
    return f"~{number}" if number else ""


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
    # Also numbers: the body computes with them as with arrays.
    carry, xs = jax.tree.map(_as_array, (init, xs))
    found, step, label, which = [], unrolled(f), label_of("scan", f), _which(call)
    for i in reversed(range(count)) if reverse else range(count):
        with jax.named_scope(f"{label}{which}[{i}]"):
            carry, y = step(carry, jax.tree.map(lambda x, i=i: _row(x, i), xs))
        found.append(y)
    if reverse:
        found.reverse()
    return carry, jax.tree.map(_stacked, *found)


def _as_array(x: Any) -> Any:
    return jnp.asarray(x) if isinstance(x, int | float | complex | np.ndarray | np.generic) else x


@untapped
def _row(x: jax.Array, i: int) -> jax.Array:
    # The converter would give all rows, and what else reads the array, the scale of one of them.
    return lax.index_in_dim(wall(x) if is_float(x) else x, i, keepdims=False)


def _stacked(*steps: Any) -> jax.Array:
    steps = tuple(map(jnp.asarray, steps))
    # Looked up at each call: it is tapped there. Integers don't have a range.
    stack = module_calls.stacked_value
    return stack(*steps) if is_float(steps[0]) else untapped(stack)(*steps)


def _cond(
    loops: bool,
    call: OpCall,
    pred: Any,
    true_fun: Callable[..., Any],
    false_fun: Callable[..., Any],
    *operands: Any,
    **options: Any,
) -> Any:
    if "operand" in options:
        operands = (*operands, options.pop("operand"))
    if options or not callable(true_fun):
        return NotImplemented
    # In the order that JAX has them in.
    branches = false_fun, true_fun
    if not isinstance(pred, jax.core.Tracer):
        return _taken("cond", loops, call, int(bool(pred)), branches, operands)
    index = (pred if pred.dtype == bool else pred != 0).astype(jnp.int32)
    return _taken("cond", loops, call, index, branches, operands)


def _switch(
    loops: bool,
    call: OpCall,
    index: Any,
    branches: Sequence[Callable[..., Any]],
    *operands: Any,
    **options: Any,
) -> Any:
    if options:
        return NotImplemented
    if isinstance(index, jax.core.Tracer):
        index = lax.clamp(np.int32(0), index.astype(jnp.int32), np.int32(len(branches) - 1))
    else:
        index = min(max(int(index), 0), len(branches) - 1)
    return _taken("switch", loops, call, index, branches, operands)


def _taken(
    kind: str,
    loops: bool,
    call: OpCall,
    index: jax.Array | int,
    branches: Sequence[Any],
    operands: Any,
) -> Any:
    """Return the result of one of several branches. All are computed.

    Those that a known index leaves out are there for the numbers of the calls alone: nothing
    reads what they return.
    """
    found = []
    labels = [label_of(kind, branch) for branch in branches]
    for i, (label, branch) in enumerate(zip(labels, branches, strict=True)):
        end = NEVER if isinstance(index, int) and i != index else BRANCH
        which = _which(call, labels.count(label), labels[:i].count(label))
        with jax.named_scope(f"{label}{which}{end}"):
            found.append(unrolled(branch, loops)(*operands))
    if isinstance(index, int):
        return found[index]
    return jax.tree.map(lambda *results: _one_of(index, results), *found)


def _one_of(index: jax.Array, results: Sequence[Any]) -> jax.Array:
    results = [jnp.asarray(one) for one in results]
    take = module_calls.branch_value
    return (take if is_float(results[0]) else untapped(take))(index, *results)
