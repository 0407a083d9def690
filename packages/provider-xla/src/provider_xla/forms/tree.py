"""Stored forms that hold another, and forms among the leaves of a tree."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

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

    ``change`` takes a form after the key of the expression of its derived weight, None for the
    parameter itself.
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

    With ``kernels`` a form that says how a kernel contracts it stays as it is.
    """

    def one(values: Any) -> Any:
        if not qn.is_form(values):  # an array, of a parameter with an adapter
            return values
        is_left = kernels and type(values).contract is not qn.StoredForm.contract
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


@dataclasses.dataclass(frozen=True, eq=False)
class AroundStored(qn.StoredForm):
    """Base of stored parameters that hold a form, ``inner``, and more.

    Attributes:
        inner: a QArray, PackedQArray or PrepackedWeight.
    """

    inner: Any

    @property
    # pyrefly: ignore [bad-override]
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return self.inner.shape

    @property
    # pyrefly: ignore [bad-override]
    def dtype(self) -> np.dtype:
        """Float dtype of the parameter."""
        return self.inner.dtype

    @property
    # pyrefly: ignore [bad-override]
    def qtype(self) -> str:
        """Name of the quantized type."""
        return self.inner.qtype

    @property
    # pyrefly: ignore [bad-override]
    def platform(self) -> str | None:
        """Return the platform whose kernels alone read its quantized values, or None."""
        return self.inner.platform

    @property
    def scale_shape(self) -> tuple[int, ...]:
        """Return the shape of the scales of ``inner``."""
        return self.inner.scale_shape

    @property
    def values(self) -> qn.StoredForm:
        """Return the form that holds the quantized values."""
        return self.inner.values

    def with_values(self, change: Callable[[Any], Any]) -> Self:
        """Return it around another form."""
        return dataclasses.replace(self, inner=self.inner.with_values(change))

    def unpacked(self) -> Self:
        """Return it around a QArray."""
        return dataclasses.replace(self, inner=self.inner.unpacked())

    def portable(self, scale_shape: Sequence[int] | None = None) -> Self:
        """Return it around a form in no kernel's layout; see ``StoredForm``."""
        return dataclasses.replace(self, inner=self.inner.portable(scale_shape))

    def takes(self, contraction: qn.Contraction, side: int, x_shape: Sequence[int] | None) -> bool:
        """Return whether it can be an operand: the other one must be an array."""
        return x_shape is not None and self.inner.takes(contraction, side, x_shape)

    @property
    def can_add(self) -> bool:
        """Return whether a kernel of ``inner`` may add to the result."""
        return self.inner.can_add
