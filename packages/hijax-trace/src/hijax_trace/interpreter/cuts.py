"""Cuts: equations that cut numbers between two, such as ReLU, read as primitives and numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .. import compat
from ..dataflow.holders import custom_body

CUTTING = frozenset(("clamp", "max", "min"))
# In shard_map a number is made to vary over devices as the operand does.
_CONVERTING = frozenset(("convert_element_type", "pcast", "pvary"))
_MOST_EQUATIONS = 8
"""Of a program that cuts numbers: ``jnp.clip`` has four."""

Cuts = tuple[Any, list[tuple[str, tuple[np.generic, ...]]]]


def cuts_of(eqn: Any, known: Mapping[Any, Any] | None = None) -> Cuts | None:
    """Return how an equation cuts the numbers of an operand, or None if it does anything else.

    Args:
        eqn: the equation: a primitive, or a call of a function such as ``jnp.clip``, or JAX's
            ``relu`` and ``relu6``, whose derivative at a bound is that of ``clamp``.
        known: variables of its jaxpr that are numbers, with these.

    Returns:
        The operand, and primitives with the numbers that are their other operands, in turn: of
        "clamp" the least and the largest, of "max" and "min" one.
    """

    def number(atom: Any) -> np.generic | None:
        if type(atom) is compat.Literal:
            value: Any = np.asarray(atom.val, atom.aval.dtype)
            return value[()] if value.ndim == 0 else None
        return None if known is None else known.get(atom)

    numbers = [number(atom) for atom in eqn.invars]
    rest = [atom for atom, found in zip(eqn.invars, numbers, strict=True) if found is None]
    if len(rest) != 1 or len(eqn.outvars) != 1 or eqn.effects:
        return None
    (atom,) = rest
    if atom.aval != eqn.outvars[0].aval:
        return None
    name = eqn.primitive.name
    if name in CUTTING:
        if name == "clamp" and eqn.invars[1] is not atom:
            return None
        return atom, [(name, tuple(found for found in numbers if found is not None))]
    if eqn.primitive is compat.jit_p:
        steps = _cuts_in(eqn.params["jaxpr"], numbers)
        return None if steps is None else (atom, steps)
    called = custom_body(eqn.primitive, eqn.params, len(eqn.invars))
    if called is None:
        return None
    is_relu = compat.is_of_jax_nn(called.jaxpr, ("relu", "relu6"))
    steps = _cuts_in(called.jaxpr, numbers) if is_relu else None
    if steps is None or [primitive for primitive, _ in steps] not in (["max"], ["max", "min"]):
        return None
    ((least,), *most) = (found for _, found in steps)
    most = most[0] if most else (least.dtype.type(np.inf),)
    return atom, [("clamp", (least, *most))]


def _cuts_in(closed: Any, numbers: Sequence[Any]) -> list[tuple[str, tuple[Any, ...]]] | None:
    """Return how a program cuts its one input that is not a number."""
    body = compat.open_of(closed)
    if compat.consts_of(closed) or len(body.eqns) > _MOST_EQUATIONS or len(body.outvars) != 1:
        return None
    known = {var: x for var, x in zip(body.invars, numbers, strict=True) if x is not None}
    (value,) = (var for var in body.invars if var not in known)
    steps: list[Any] = []
    for eqn in body.eqns:
        if value not in eqn.invars:  # numbers that are converted
            (given, *more), name = eqn.invars, eqn.primitive.name
            x = given.val if type(given) is compat.Literal else known.get(given)
            if name not in _CONVERTING or more or x is None or np.ndim(x):
                return None
            dtype = eqn.outvars[0].aval.dtype
            with np.errstate(over="ignore"):  # an infinity, as in JAX
                known[eqn.outvars[0]] = np.asarray(x).astype(dtype)[()]
            continue
        found = cuts_of(eqn, known)
        if found is None:
            return None
        steps += found[1]
        (value,) = eqn.outvars
    return steps if steps and value is body.outvars[0] else None
