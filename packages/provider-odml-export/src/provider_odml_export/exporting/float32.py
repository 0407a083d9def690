"""Half precision at export: LiteRT's converter has no arithmetic of bfloat16, and no ranges of
float16, so that a program is written in float32."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import jaxpr_as_fun

from provider_odml.features import (
    HOLDERS,
    Interpreter,
    bind_again,
    closed_of,
    equations_in,
    program_of,
)

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


def _has_half(program: Any) -> bool:
    atoms = [closed_of(program).jaxpr.invars]
    atoms += [(*eqn.invars, *eqn.outvars) for eqn in equations_in(program)]
    return any(getattr(x.aval, "dtype", None) in _HALF for x in itertools.chain(*atoms))


_ABOUT_BITS = ("bitcast_convert_type", "nextafter")
"""Primitives that mean the bits of a number: they are computed in the number's own precision."""


class _InFloat32(Interpreter):
    """Computes in float32 what a program computes in half precision."""

    def constant(self, value: Any) -> Any:
        return widened(jnp.asarray(value))

    def equation(self, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        if eqn.primitive.name in _ABOUT_BITS:
            given = [x.astype(var.aval.dtype) for x, var in zip(operands, eqn.invars, strict=True)]
            return [widened(x) for x in bind_again(eqn, given)]
        if program_of(eqn) is not None or eqn.primitive.name in HOLDERS:
            return super().equation(eqn, operands)
        changed = {key: self._wide(value) for key, value in eqn.params.items()}
        changed = {key: value for key, value in changed.items() if value is not None}
        return bind_again(eqn, operands, **changed)

    def _wide(self, value: Any) -> Any:
        """Return a parameter for float32; None for one that stays: types, and what is reduced by.

        The latter are programs: of a sum that is written as a function, of what a scatter adds, of
        a composite. An equation whose results have another precision than its program is refused.
        """
        if _is_half(value):
            return jnp.dtype(jnp.float32)
        if not hasattr(value, "eqns") or not _has_half(value):
            return None
        avals = [var.aval for var in closed_of(value).jaxpr.invars]
        types = [widened_type(aval) for aval in avals]
        body = jax.make_jaxpr(lambda *args: self.run(value, args))(*types)
        return body if hasattr(value, "consts") else body.jaxpr


def widened_type(aval: Any) -> jax.ShapeDtypeStruct:
    """Return the type of an array as the file has it."""
    dtype = jnp.float32 if aval.dtype in _HALF else aval.dtype
    return jax.ShapeDtypeStruct(aval.shape, dtype)


def _is_half(value: Any) -> bool:
    try:
        return jnp.dtype(value) in _HALF
    except (TypeError, ValueError):
        return False
