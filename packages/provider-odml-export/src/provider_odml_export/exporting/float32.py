"""Half precision at export: LiteRT's converter has no arithmetic of bfloat16, and no ranges of
float16, so that a program is written in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from provider_odml.features import Interpreter, bind_again, equations_in

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
    found = _InFloat32().run(closed, values) if _has_half(closed) else jaxpr_as_fun(closed)(*values)
    return jax.tree.unflatten(jax.tree.structure(out), found)


def _has_half(closed: Any) -> bool:
    return any(
        getattr(var.aval, "dtype", None) in _HALF
        for eqn in equations_in(closed)
        for var in (*eqn.invars, *eqn.outvars)
    )


class _InFloat32(Interpreter):
    """Computes in float32 what a program computes in half precision."""

    def constant(self, value: Any) -> Any:
        return widened(jnp.asarray(value))

    def equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        params = eqn.params
        if eqn.primitive.name == "composite":
            key = "jaxpr" if "jaxpr" in params else "call_jaxpr"  # 0.10.2; 0.12
            body = jax.make_jaxpr(lambda *args: self.run(params[key], args))(*operands)
            return bind_again(eqn, operands, **{key: body})
        half = {key: jnp.dtype(jnp.float32) for key, value in params.items() if _is_half(value)}
        return bind_again(eqn, operands, **half) if half else super().equation(eqn, operands)


def _is_half(value: Any) -> bool:
    try:
        return jnp.dtype(value) in _HALF
    except (TypeError, ValueError):
        return False
