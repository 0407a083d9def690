"""Contractions that add what the program adds to their result, by their kernel."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax

from hijax_trace import repeated

from ..kernels.matmul import Added, can_add
from ..kernels.packed import PrepackedWeight
from ..program.contractions import Contraction
from ..program.joining import Joining
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
    return repeated(_ADDING.of(_Call(contraction, hows, treedef)), (), *leaves)


class _Call(NamedTuple):
    """A contraction of flat operands, and what is added: a bias, a residual, or both, last."""

    contraction: Contraction
    hows: Hows
    treedef: Any
    has_bias: bool = False
    has_residual: bool = False


def _run(call: _Call, *leaves: jax.Array) -> jax.Array:
    *rest, residual = leaves if call.has_residual else (*leaves, None)
    *rest, bias = rest if call.has_bias else (*rest, None)
    given = jax.tree.unflatten(call.treedef, rest)
    return quantized_contraction(call.contraction, call.hows, *given, Added(bias, residual))


def _join(call: _Call, primitive: str, has_result_shape: bool) -> _Call | None:
    if primitive != "add" or call.has_residual:
        return None
    if has_result_shape:
        return call._replace(has_residual=True)
    return None if call.has_bias else call._replace(has_bias=True)


_ADDING = Joining("quantized_contraction", _run, _join)
