"""The kinds of masks, biases, softmaxes and layouts, with Transformer Engine's numbers."""

from __future__ import annotations

import enum


class AttnBiasType(enum.IntEnum):
    """Where a bias is added to the scores, ``s = q k^T``.

    - NO_BIAS: ``softmax(scale * s)``
    - PRE_SCALE_BIAS: ``softmax(scale * (s + bias))``
    - POST_SCALE_BIAS: ``softmax(scale * s + bias)``
    """

    NO_BIAS = 0
    PRE_SCALE_BIAS = 1
    POST_SCALE_BIAS = 2


class AttnMaskType(enum.IntEnum):
    """Which keys a query sees.

    Causal: those up to its own place, counted from the first query and key, or (bottom right) from
    the last ones. Padding: sequences have separate lengths, and what is after them is not seen.
    """

    NO_MASK = 0
    PADDING_MASK = 1
    CAUSAL_MASK = 2
    PADDING_CAUSAL_MASK = 3
    CAUSAL_BOTTOM_RIGHT_MASK = 4
    PADDING_CAUSAL_BOTTOM_RIGHT_MASK = 5

    def is_causal(self) -> bool:
        """Return whether later keys are not seen."""
        return self >= AttnMaskType.CAUSAL_MASK

    def is_padding(self) -> bool:
        """Return whether sequences have separate lengths."""
        return self in (
            AttnMaskType.PADDING_MASK,
            AttnMaskType.PADDING_CAUSAL_MASK,
            AttnMaskType.PADDING_CAUSAL_BOTTOM_RIGHT_MASK,
        )

    def is_bottom_right(self) -> bool:
        """Return whether the last query is beside the last key."""
        return self >= AttnMaskType.CAUSAL_BOTTOM_RIGHT_MASK


class AttnSoftmaxType(enum.IntEnum):
    """What softmax divides ``exp(s)`` by.

    - VANILLA_SOFTMAX: ``sum(exp(s))``
    - OFF_BY_ONE_SOFTMAX: ``1 + sum(exp(s))``
    - LEARNABLE_SOFTMAX: ``exp(offset) + sum(exp(s))``, with an offset for each head
    """

    VANILLA_SOFTMAX = 0
    OFF_BY_ONE_SOFTMAX = 1
    LEARNABLE_SOFTMAX = 2

    @classmethod
    def from_str(cls, softmax_type: str) -> AttnSoftmaxType:
        """Return the type of "vanilla", "off_by_one" or "learnable"."""
        for member in cls:
            if member.name == f"{softmax_type.upper()}_SOFTMAX":
                return member
        raise ValueError(
            f"softmax_type must be 'vanilla', 'off_by_one' or 'learnable', got {softmax_type!r}"
        )


class QKVLayout(enum.IntEnum):
    """How queries, keys and values lie in arrays.

    - BS3HD: one array [b, s, 3, h, d]
    - BSHD_BS2HD: queries [b, s, h, d]; keys and values [b, s, 2, h, d]
    - BSHD_BSHD_BSHD: three arrays [b, s, h, d]
    - T3HD, THD_T2HD, THD_THD_THD: the same, with several segments packed in each sequence
    """

    BS3HD = 5
    BSHD_BS2HD = 7
    BSHD_BSHD_BSHD = 9
    T3HD = 10
    THD_T2HD = 12
    THD_THD_THD = 14

    @property
    def arrays(self) -> int:
        """Return the number of arrays."""
        return 1 if self.is_qkvpacked() else 2 if self.is_kvpacked() else 3

    def is_qkvpacked(self) -> bool:
        """Return whether there is one array."""
        return self in (QKVLayout.BS3HD, QKVLayout.T3HD)

    def is_kvpacked(self) -> bool:
        """Return whether there is one array of keys and values."""
        return self in (QKVLayout.BSHD_BS2HD, QKVLayout.THD_T2HD)

    def is_separate(self) -> bool:
        """Return whether there are three arrays."""
        return self in (QKVLayout.BSHD_BSHD_BSHD, QKVLayout.THD_THD_THD)

    def is_thd(self) -> bool:
        """Return whether segments are packed."""
        return self >= QKVLayout.T3HD
