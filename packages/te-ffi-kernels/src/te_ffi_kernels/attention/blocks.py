"""What of a block of queries and a block of keys meets, where a sequence is cut into blocks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config, Sizes
from .types import AttnMaskType, AttnSoftmaxType, QKVLayout


@dataclasses.dataclass(frozen=True)
class Cut:
    """The part of two blocks that meets.

    Attributes:
        config: of a kernel for it, without what is left to the end.
        queries: number of queries before the first one that sees a key of the block.
        keys: number of keys before the first one that a query of the block sees.
    """

    config: Config
    queries: int
    keys: int


def cuts(config: Config, sizes: Sizes, count: int) -> tuple[list[Cut | None], np.ndarray]:
    """Return the different ways in which blocks meet, and which one it is for each pair.

    Args:
        config: of the whole attention.
        sizes: of a block of queries and of one of keys.
        count: the number of blocks.

    Returns:
        The ways, with None where no query sees a key; and their numbers, int32
        ``[block of queries, block of keys]``.
    """
    queries, keys = sizes.q_length, sizes.kv_length
    left, right = config.window_size
    right = 0 if config.mask_type.is_causal() else right
    aligned = count * (keys - queries) if config.mask_type.is_bottom_right() else 0
    numbers: dict[Cut | None, int] = {}
    table = np.zeros((count, count), np.int32)
    for i in range(count):
        for j in range(count):
            # The place of a key less that of a query is this much more than inside of the blocks.
            ahead = j * keys - i * queries - aligned
            low = -left - ahead if left >= 0 else -queries
            high = right - ahead if right >= 0 else keys
            cut = None
            if high > -queries and low < keys:
                cut = _cut(config, max(low, -queries), min(high, keys), sizes)
            table[i, j] = numbers.setdefault(cut, len(numbers))
    return list(numbers), table


def _cut(config: Config, low: int, high: int, sizes: Sizes) -> Cut:
    """Return the cut where queries see keys that are from `low` to `high` places after them."""
    queries, keys = max(-high, 0), max(low, 0)
    low, high = low + queries - keys, high + queries - keys
    left = -low if low > -(sizes.q_length - queries - 1) else -1
    right = high if high < sizes.kv_length - keys - 1 else -1
    padding = config.mask_type.is_padding()
    if right == 0:
        kind = AttnMaskType.PADDING_CAUSAL_MASK if padding else AttnMaskType.CAUSAL_MASK
        right = -1
    else:
        kind = AttnMaskType.PADDING_MASK if padding else AttnMaskType.NO_MASK
    qkv = QKVLayout.BSHD_BSHD_BSHD if config.layout.is_separate() else QKVLayout.BSHD_BS2HD
    step = dataclasses.replace(
        config,
        mask_type=kind,
        window_size=(left, right),
        layout=qkv,
        softmax_type=AttnSoftmaxType.VANILLA_SOFTMAX,  # a sink is for all keys: added at the end
        context_axes=(),
    )
    return Cut(step, queries, keys)


def lengths_in(lengths: jax.Array, block: jax.Array, size: int, before: int) -> jax.Array:
    """Return how much of sequences is in a block, without what is before its first place.

    Args:
        lengths: of the sequences, int32 ``[batch]``.
        block: the number of the block, int32.
        size: of a block.
        before: what to leave out at its begin.
    """
    return jnp.clip(lengths - block * size - before, 0, size - before)
