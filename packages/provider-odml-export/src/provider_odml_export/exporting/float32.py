"""Half precision at export: LiteRT's converter has no arithmetic of bfloat16, and no ranges of
float16, so that a program is written in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core

from provider_odml.features import equations_in, evaluated, program_of

_HALF = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))


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
    found = _run(closed, values) if _has_half(closed) else core.jaxpr_as_fun(closed)(*values)
    return jax.tree.unflatten(jax.tree.structure(out), found)


def _has_half(closed: Any) -> bool:
    return any(
        getattr(var.aval, "dtype", None) in _HALF
        for eqn in equations_in(closed)
        for var in (*eqn.invars, *eqn.outvars)
    )


def _run(jaxpr: Any, args: Sequence[Any]) -> list[Any]:
    return evaluated(jaxpr, args, _bind, lambda value: widened(jnp.asarray(value)))


def _bind(eqn: Any, operands: list[Any]) -> Sequence[Any]:
    name, params = eqn.primitive.name, dict(eqn.params)
    program = program_of(eqn)
    if program is not None:
        return _run(program, operands)
    if name == "composite":
        key = "jaxpr" if "jaxpr" in params else "call_jaxpr"  # 0.10.2; 0.12
        body = params[key]
        params[key] = jax.make_jaxpr(lambda *args: _run(body, args))(*operands)
        return eqn.primitive.bind(*operands, **params)
    if name == "cond":
        index, *rest = operands
        branches = [lambda *args, b=b: tuple(_run(b, args)) for b in params["branches"]]
        return jax.lax.switch(index, branches, *rest)
    params = {key: jnp.dtype(jnp.float32) if _is_half(v) else v for key, v in params.items()}
    found = eqn.primitive.bind(*operands, **params)
    return found if eqn.primitive.multiple_results else [found]


def _is_half(value: Any) -> bool:
    try:
        return jnp.dtype(value) in _HALF
    except (TypeError, ValueError):
        return False
