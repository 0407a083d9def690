"""Numbers of 4 bits, two in a byte."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np


def nibbles(octets: np.ndarray, low_first: bool = True) -> np.ndarray:
    """Return uint8[*lead, 2 * n], the halves of each byte of uint8[*lead, n]."""
    halves = octets & 15, octets >> 4
    both = np.stack(halves if low_first else halves[::-1], axis=-1)
    return both.reshape(*octets.shape[:-1], 2 * octets.shape[-1])


def as_float4(numbers: np.ndarray) -> np.ndarray:
    """Return float4_e2m1fn of uint8, whose low four bits are those of each number."""
    table = np.asarray([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    both = np.concatenate([table, -table]).astype(jnp.float4_e2m1fn)
    return both[numbers]


def from_float4(numbers: np.ndarray) -> np.ndarray:
    """Return uint8 in 0 to 15 of float4_e2m1fn: see ``as_float4``."""
    return numbers.view(np.uint8) & 15


def whole_bytes(halves: np.ndarray) -> np.ndarray:
    """Return uint8[*lead, n / 2] of halves[*lead, n], low halves first."""
    return (halves[..., ::2] | halves[..., 1::2] << 4).astype(np.uint8)
