"""Stored parameters: their nodes in a tree, and as operands."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import quant_numerics as qn
from hijax_trace import Carrier
from quant_numerics import Contraction

from ..errors import QuantizationError
from ..kernels.packed import PrepackedWeight
from ..program.matching import Under
from ..program.sites import Site
from .affine import AffineWeight, takes_minimum
from .transformed import TransformedWeight


def is_stored(node: Any) -> bool:
    """Return whether a node is a quantized parameter, packed or not."""
    return _is_stored_type(type(node))


# Asked for each leaf: isinstance of abstract classes costs ten times as much.
@functools.lru_cache(maxsize=256)
def _is_stored_type(kind: type) -> bool:
    quantized = qn.QArray | qn.PackedQArray | PrepackedWeight
    return issubclass(kind, quantized | TransformedWeight | AffineWeight | Carrier)


def mapped(change: Callable[[Any], Any], held: Carrier) -> Carrier:
    """Return a parameter, and the derived weights beside it, each changed."""
    derived = {key: change(one) for key, one in held.derived.items()}
    return dataclasses.replace(held, own=change(held.own), derived=derived)


def unpacked_leaf(leaf: Any, *, kernels: bool = False) -> Any:
    """Return a stored parameter in a form that programs take.

    Args:
        leaf: a leaf of parameters.
        kernels: whether parameters that are packed for kernels stay packed.
    """
    if isinstance(leaf, PrepackedWeight):
        return leaf if kernels else leaf.unpacked()
    if isinstance(leaf, Carrier):
        return mapped(lambda one: unpacked_leaf(one, kernels=kernels), leaf)
    if isinstance(leaf, TransformedWeight | AffineWeight):
        return leaf.unpacked()
    return qn.unpack(leaf) if isinstance(leaf, qn.PackedQArray) else leaf


def transformed(
    contraction: Contraction, operands: Sequence[Any], *, but_rotated: bool = False
) -> list[Any]:
    """Return operands with transformed parameters and activations.

    Args:
        contraction: the contraction.
        operands: activations and stored parameters.
        but_rotated: whether a rotation that a kernel may do stays with the parameter.
    """
    found = list(operands)
    for side, held in enumerate(operands):
        if isinstance(held, TransformedWeight):
            first, rotated = held.split() if but_rotated else (held, None)
            found[1 - side] = first.activation(contraction, side, found[1 - side])
            found[side] = held.inner if rotated is None else rotated
    return found


def takes(site: Site, side: int, held: Any) -> bool:
    """Return whether a stored parameter can be that operand of a site."""
    if not isinstance(held, TransformedWeight | AffineWeight):
        return True
    other = site.operands[1 - side]
    if site.call.proxy(other) is not None:
        return False
    if isinstance(held, AffineWeight):
        return takes_minimum(site.contraction)
    return held.pairs(site.contraction, side, other.shape) is not None


def beside(site: Site, side: int) -> TransformedWeight | None:
    """Return the transformed parameter for an activation, or None."""
    other = site.call.proxy(site.operands[1 - side])
    is_made_for_it = isinstance(other, TransformedWeight) and takes(site, 1 - side, other)
    return other if is_made_for_it else None


def stored_form(held: Any) -> Any:
    """Return the array proxy that holds a stored parameter's quantized values."""
    return held.inner if isinstance(held, TransformedWeight | AffineWeight) else held


def _encoded(is_parameter: Any) -> str:
    """Return which inputs are parameters, as text."""
    if not isinstance(is_parameter, Under):
        raise QuantizationError(
            "A parameter with derived weights must be one that plan.quantize returned to be "
            f"exported, got one with is_parameter={is_parameter!r}. Quantize it by a plan."
        )
    return is_parameter.prefix


qn.register_serialization(Carrier, _encoded, Under)
