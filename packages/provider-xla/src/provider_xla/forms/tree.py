"""Stored leaves: the forms in a tree of parameters, alone or beside what is derived from them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import quant_numerics as qn
from hijax_trace import Carrier

from ..errors import QuantizationError
from ..program.matching import Under


def is_stored(node: Any) -> bool:
    """Return whether a node is a stored parameter: a form, or a carrier of forms."""
    return _is_stored_type(type(node))


# Asked for each leaf: isinstance of abstract classes costs ten times as much.
@functools.lru_cache(maxsize=256)
def _is_stored_type(kind: type) -> bool:
    return issubclass(kind, qn.StoredForm | Carrier)


def map_forms(change: Callable[[str | None, Any], Any], leaf: Any) -> Any:
    """Return a leaf with each stored form in it changed.

    Args:
        change: takes the key of the expression of a derived weight, None for the parameter itself,
            and a form.
        leaf: any leaf; without a form it is returned as it is.
    """
    if not isinstance(leaf, Carrier):
        return change(None, leaf) if qn.is_form(leaf) else leaf
    own = change(None, leaf.own) if qn.is_form(leaf.own) else leaf.own
    derived = {key: change(key, one) for key, one in leaf.derived.items()}
    return dataclasses.replace(leaf, own=own, derived=derived)


def own_form(leaf: Any) -> Any:
    """Return what is stored for a parameter itself, without derived weights."""
    return leaf.own if isinstance(leaf, Carrier) else leaf


def unpacked_leaf(leaf: Any, *, kernels: bool = False) -> Any:
    """Return a leaf with QArrays for quantized values in packed storage.

    Args:
        leaf: any leaf.
        kernels: whether weights that are packed for kernels stay packed.
    """

    def one(values: Any) -> Any:
        # Of a parameter with an adapter the values may be an array.
        is_left = not qn.is_form(values) or (kernels and values.platform is not None)
        return values if is_left else values.unpacked()

    return map_forms(lambda _, form: form.with_values(one), leaf)


def _encoded(is_parameter: Any) -> str:
    """Return which inputs are parameters, as text."""
    if not isinstance(is_parameter, Under):
        raise QuantizationError(
            "A parameter with derived weights must be one that plan.quantize returned to be "
            f"exported, got one with is_parameter={is_parameter!r}. Quantize it by a plan."
        )
    return is_parameter.prefix


qn.register_serialization(Carrier, _encoded, Under)
