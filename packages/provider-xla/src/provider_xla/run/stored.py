"""Stored parameters: the kinds of nodes that stand for them in a tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import quant_numerics as qn
from hijax_trace import Carrier

from ..errors import QuantizationError
from ..kernels.packed import PrepackedWeight
from ..program.sites import Under
from .affine import AffineWeight
from .transformed import TransformedWeight


def is_stored(node: Any) -> bool:
    """Returns whether a node of parameters is a quantized one, packed or not."""
    quantized = qn.QArray | qn.PackedQArray | PrepackedWeight
    return isinstance(node, quantized | TransformedWeight | AffineWeight | Carrier)


def mapped(change: Callable[[Any], Any], held: Carrier) -> Carrier:
    """Return a parameter, and the derived weights beside it, each changed."""
    derived = {key: change(one) for key, one in held.derived.items()}
    return dataclasses.replace(held, own=change(held.own), derived=derived)


def unpacked_leaf(leaf: Any, *, kernels: bool = False) -> Any:
    """Return a stored parameter in a form that programs take.

    Args:
        leaf: a leaf of parameters.
        kernels: whether what is packed for kernels stays so.
    """
    if isinstance(leaf, Carrier):
        return mapped(lambda one: unpacked_leaf(one, kernels=kernels), leaf)
    is_packed = isinstance(leaf, PrepackedWeight) and not kernels
    if is_packed or isinstance(leaf, TransformedWeight | AffineWeight):
        return leaf.unpacked()
    return qn.unpack(leaf) if isinstance(leaf, qn.PackedQArray) else leaf


def _encoded(is_parameter: Any) -> str:
    """Return which inputs are parameters, as text."""
    if not isinstance(is_parameter, Under):
        raise QuantizationError(
            "A parameter with derived weights must be one that plan.quantize returned to be "
            f"exported, got one with is_parameter={is_parameter!r}. Quantize it by a plan."
        )
    return is_parameter.prefix


qn.register_serialization(Carrier, _encoded, Under)
