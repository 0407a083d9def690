"""Integers of a few bits in 32-bit words, as compressed-tensors packs them."""

from __future__ import annotations

import numpy as np


def pack(values: np.ndarray, bits: int) -> np.ndarray:
    """Pack the last axis.

    Args:
        values: int8 [*lead, n], signed numbers of ``bits`` bits.
        bits: 1 to 8.

    Returns:
        int32 [*lead, ceil(n * bits / 32)]: number i is at the bits from ``i * bits``, with half of
        the range added.
    """
    numbers = (values.astype(np.int16) + 2 ** (bits - 1)).astype(np.uint8)
    every = np.unpackbits(numbers[..., None], axis=-1, count=bits, bitorder="little")
    stream = every.reshape(*values.shape[:-1], values.shape[-1] * bits)
    missing = -stream.shape[-1] % 32
    stream = np.pad(stream, [(0, 0)] * (values.ndim - 1) + [(0, missing)])
    return np.packbits(stream, axis=-1, bitorder="little").view("<i4").astype(np.int32)


def unpack(words: np.ndarray, bits: int, n: int) -> np.ndarray:
    """Unpack the last axis: see ``pack``.

    Raises:
        ValueError: there are too few words or too many for n numbers.
    """
    check(words)
    if words.shape[-1] != -(-n * bits // 32):
        raise ValueError(
            f"{n} numbers of {bits} bits must be in {-(-n * bits // 32)} words, got "
            f"{words.shape[-1]}"
        )
    octets = np.ascontiguousarray(words.astype("<i4")).view(np.uint8)
    stream = np.unpackbits(octets, axis=-1, bitorder="little")[..., : n * bits]
    numbers = np.packbits(stream.reshape(*words.shape[:-1], n, bits), axis=-1, bitorder="little")
    return (numbers[..., 0].astype(np.int16) - 2 ** (bits - 1)).astype(np.int8)


def check(words: np.ndarray) -> None:
    """Check that an array is of words.

    Raises:
        ValueError: it has another dtype.
    """
    if words.dtype != np.int32:
        raise ValueError(f"its words must be int32, got {words.dtype.name}")
