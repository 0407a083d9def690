"""Half precision at export: LiteRT's converter has no arithmetic of bfloat16, and no ranges of
float16, so that a program is written in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

_HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_CALLS = {"jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "custom_jvp_call":
          "call_jaxpr", "custom_vjp_call": "call_jaxpr", "checkpoint": "jaxpr", "remat2":
          "jaxpr", "core_call": "call_jaxpr"}  # fmt: skip
"""Primitives that are calls of a program, with the parameter that holds it."""


def widened(x: Any) -> Any:
    """Return an array, in float32 if it has half precision."""
    return x.astype(jnp.float32) if getattr(x, "dtype", None) in _HALF else x


def in_float32(fn: Callable[..., Any], types: Sequence[Any], values: Sequence[Any]) -> Any:
    """Return ``fn(*values)``, computed in float32 where ``fn`` computes in half precision.

    Args:
        fn: a function of arrays.
        types: what it is traced for.
        values: arrays of those types, but in float32 for half precision.
    """
    closed, out = jax.make_jaxpr(fn, return_shape=True)(*types)
    leaves = list(values)
    if not _has_half(closed):
        found = core.jaxpr_as_fun(closed)(*leaves)
    else:
        found = _run(closed.jaxpr, closed.consts, leaves)
    return jax.tree.unflatten(jax.tree.structure(out), found)


def _has_half(closed: Any) -> bool:
    return any(
        getattr(var.aval, "dtype", None) in _HALF
        for jaxpr in _all_in(closed.jaxpr)
        for eqn in jaxpr.eqns
        for var in (*eqn.invars, *eqn.outvars)
    )


def _all_in(jaxpr: Any) -> Iterator[Any]:
    yield jaxpr
    for eqn in jaxpr.eqns:
        for param in eqn.params.values():
            for one in param if isinstance(param, tuple | list) else (param,):
                inner = getattr(one, "jaxpr", one)
                if hasattr(inner, "eqns"):
                    yield from _all_in(inner)


def _run(jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
    values: dict[Any, Any] = {}

    def read(atom: Any) -> Any:
        return widened(jnp.asarray(atom.val)) if isinstance(atom, core.Literal) else values[atom]

    values.update(zip(jaxpr.constvars, map(widened, consts), strict=True))
    values.update(zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        operands = [read(atom) for atom in eqn.invars]
        values.update(zip(eqn.outvars, _bind(eqn, operands), strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def _bind(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, dict(eqn.params)
    if name in _CALLS and _CALLS[name] in params:
        inner = params[_CALLS[name]]
        return _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands)
    if name == "composite":
        key = "jaxpr" if "jaxpr" in params else "call_jaxpr"  # 0.10.2; 0.12
        body = params[key]
        params[key] = jax.make_jaxpr(lambda *args: _run(body.jaxpr, body.consts, args))(*operands)
        return eqn.primitive.bind(*operands, **params)
    if name == "cond":
        index, *rest = operands
        branches = [
            lambda *args, b=branch: tuple(_run(b.jaxpr, b.consts, args))
            for branch in params["branches"]
        ]
        return jax.lax.switch(index, branches, *rest)
    params = {key: jnp.dtype(jnp.float32) if _is_half(v) else v for key, v in params.items()}
    found = eqn.primitive.bind(*operands, **params)
    return found if eqn.primitive.multiple_results else [found]


def _is_half(value: Any) -> bool:
    try:
        return jnp.dtype(value) in _HALF
    except (TypeError, ValueError):
        return False
