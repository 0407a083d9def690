"""Contractions that add what the program adds to their result.

A kernel can add a bias and a residual as it stores its rows. The program adds them in operations of
their own: hijax-trace asks the name of the contraction's call for the sum. See "Joins" in the
README of its interpreter.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from hijax_trace import repeated

from ..kernels.matmul import Added, can_add
from ..kernels.packed import PrepackedWeight
from ..program.contractions import Contraction
from .contraction import Hows, Operands, quantized_contraction
from .stored import stored_form


def contracted(
    contraction: Contraction,
    hows: Hows,
    operands: Operands,
    extras: tuple[Any, ...],
    calibrations: tuple[Any, Any],
) -> jax.Array:
    """Return ``quantized_contraction``, which joins additions if a kernel may do them."""
    forms = map(stored_form, operands)
    if not any(isinstance(form, PrepackedWeight) and can_add(form) for form in forms):
        static = contraction, hows
        return repeated(quantized_contraction, static, *operands, extras, calibrations)
    leaves, treedef = jax.tree.flatten((*operands, extras, calibrations))
    return repeated(_adding(_Call(contraction, hows, treedef)), (), *leaves)


class _Call(NamedTuple):
    """A contraction of flat operands, and what is added: a bias, a residual, or both, last."""

    contraction: Contraction
    hows: Hows
    treedef: Any
    has_bias: bool = False
    has_residual: bool = False


class _Name(str):
    """The name of a call's function."""

    call: _Call

    def joined(
        self,
        primitive: str,
        params: Mapping[str, Any],
        operands: Sequence[jax.Array],
        which: int,
        call: Sequence[jax.Array],
    ) -> Any:
        """Return the sum of the call's result and the other operand; see ``hijax_trace``."""
        of = self.call
        if primitive != "add" or of.has_residual:
            return NotImplemented
        added = operands[1 - which]
        if added.ndim == operands[which].ndim:
            return _adding(of._replace(has_residual=True))(*call, added)
        if of.has_bias:
            return NotImplemented
        return _adding(of._replace(has_bias=True))(*call, added)


@functools.lru_cache(maxsize=4096)
def _adding(of: _Call) -> Callable[..., jax.Array]:
    """Return the jitted function of a call."""

    def run(*leaves: jax.Array) -> jax.Array:
        *rest, residual = leaves if of.has_residual else (*leaves, None)
        *rest, bias = rest if of.has_bias else (*rest, None)
        given = jax.tree.unflatten(of.treedef, rest)
        return quantized_contraction(of.contraction, of.hows, *given, Added(bias, residual))

    run.__name__ = name = _Name("quantized_contraction")
    name.call = of
    return jax.jit(run)
