"""AroundStored: a stored parameter that holds another stored form, and more."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np

import quant_numerics as qn


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
