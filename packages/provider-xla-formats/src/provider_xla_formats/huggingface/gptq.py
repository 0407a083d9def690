"""GPTQ (AutoGPTQ, GPTQModel) and AWQ (AutoAWQ): integers in 32-bit words, in groups of rows.

Frantar et al. 2022, arXiv:2210.17323, and Lin et al. 2023, arXiv:2306.00978. Both store a weight
[in, out]: int32 words, zero points in words, too, and scales in float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jax.typing import DTypeLike

from provider_xla.file_formats import StoreError

from .method import Method, check_words, grouped, unpack_words

_BITS = (2, 3, 4, 8)
_INTERLEAVED = (0, 2, 4, 6, 1, 3, 5, 7)
"""Columns of a word of AWQ, from its lowest bits on."""


class Gptq(Method):
    """A word has rows that follow each other; ``g_idx`` says the group of each row."""

    parts = (".qweight", ".qzeros", ".scales", ".g_idx")
    marks = (".qweight",)

    def __init__(self, where: str, config: Mapping[str, Any]):
        bits, form = config.get("bits"), config.get("checkpoint_format", "gptq")
        form = "marlin" if config.get("is_marlin_format") else form
        if bits not in _BITS or form not in ("gptq", "gptq_v2"):
            raise StoreError(
                f"{where} must have {', '.join(map(str, _BITS))} bits and checkpoint_format gptq "
                f"or gptq_v2, got {bits} and {form!r}."
            )
        # The first form stores zero points less 1, so that 0 wraps around.
        self._bits, self._less = bits, int(form == "gptq")
        self._has_order = bool(config.get("desc_act"))

    def read(self, module: str, found: Mapping[str, np.ndarray], dtype: DTypeLike | None) -> Any:
        """Return a weight; see ``Method``."""
        words, scale, columns = found[".qweight"], found[".scales"], found.get(".g_idx")
        check_words(words)
        # Single modules may have other bits than the config says.
        k = len(words) * 32 // self._bits if columns is None else len(columns)
        bits = len(words) * 32 // max(k, 1)
        if bits not in _BITS:
            raise ValueError(f"{len(words)} rows of words hold {k} rows of {bits} bits each")
        values = unpack_words(words.T, bits, k)
        points = unpack_words(found[".qzeros"], bits, scale.shape[-1]).T.astype(np.int16)
        half = 2 ** (bits - 1)
        points = ((points + half + self._less) % (2 * half) - half).astype(np.int8)
        # Without act-order some writers leave zeros there, which no reader looks at.
        if not self._has_order or (columns is not None and not columns.any()):
            columns = None
        return grouped(values, scale.T, points, columns, f"int{bits}", dtype or scale.dtype)


class Awq(Method):
    """A word has columns in the order that its CUDA kernel unpacks them in."""

    parts = (".qweight", ".qzeros", ".scales")
    marks = (".qweight",)

    def __init__(self, where: str, config: Mapping[str, Any]):
        bits = config.get("bits", config.get("w_bit"))
        version = str(config.get("version", "gemm")).lower()
        if bits != 4 or version != "gemm":
            raise StoreError(
                f"{where} must have 4 bits and version gemm, got {bits} and {version}. Convert it, "
                "or take the float checkpoint, by quantize_file."
            )

    def read(self, module: str, found: Mapping[str, np.ndarray], dtype: DTypeLike | None) -> Any:
        """Return a weight; see ``Method``."""
        scale, points = found[".scales"], found.get(".qzeros")
        points = None if points is None else _columns(points).T
        values = _columns(found[".qweight"]).T
        return grouped(values, scale.T, points, None, "int4", dtype or scale.dtype)


def _columns(words: np.ndarray) -> np.ndarray:
    """Return int8[rows, 8 * n] in -8 to 7 of int32[rows, n]."""
    each = unpack_words(words, 4, 8 * words.shape[1]).reshape(*words.shape, 8)
    return each[..., np.argsort(_INTERLEAVED)].reshape(words.shape[0], 8 * words.shape[1])
