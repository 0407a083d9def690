"""Masks between a block of queries and a block of keys, where a sequence is cut into blocks."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from .config import Config, Sizes
from .types import AttnMaskType, AttnSoftmaxType, QKVLayout

_FEW = 8


@dataclasses.dataclass(frozen=True)
class Cut:
    """The part of two blocks in which queries see keys.

    Attributes:
        config: config of the kernel call for it, without the softmax offset, which is added last.
        queries: number of queries before the first one that sees a key of the block.
        keys: number of keys before the first one that a query of the block sees.
    """

    config: Config
    queries: int
    keys: int


def cuts(config: Config, sizes: Sizes, count: int) -> tuple[list[Cut | None], np.ndarray]:
    """Return the different cuts, and which one each pair of blocks has.

    Args:
        config: config of the whole attention.
        sizes: sizes of a block of queries and a block of keys.
        count: the number of blocks.

    Returns:
        The cuts, None where no query sees a key; and the index of each pair's cut, int32
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
            # From a query to a key it is this much farther in the sequence than inside the blocks.
            ahead = j * keys - i * queries - aligned
            low = -left - ahead if left >= 0 else -queries
            high = right - ahead if right >= 0 else keys
            cut = None
            if high > -queries and low < keys:
                cut = _cut(config, max(low, -queries), min(high, keys), sizes)
            table[i, j] = numbers.setdefault(cut, len(numbers))
    return list(numbers), table


def are_few_cuts(config: Config, sizes: Sizes) -> bool:
    """Return whether blocks meet in few ways, whatever their number.

    Each way is one more kernel call in the program. The border of a mask crosses blocks of other
    lengths in as many ways as there are blocks, unless those of one are a few of the other.

    Args:
        config: config of the whole attention.
        sizes: sizes of the whole sequences.
    """
    short, long = sorted((sizes.q_length, sizes.kv_length))
    has_border = config.mask_type.is_causal() or max(config.window_size) >= 0
    return not has_border or (short > 0 and long % short == 0 and long // short <= _FEW)


def _cut(config: Config, low: int, high: int, sizes: Sizes) -> Cut:
    """Return the cut where queries see keys `low` to `high` places ahead."""
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
    """Return how many tokens of each sequence a block's part has.

    Args:
        lengths: lengths of the sequences, int32 ``[batch]``.
        block: index of the block, int32.
        size: tokens of a block.
        before: how many places at the start of the block are not in the part.

    Returns:
        int32 ``[batch]``.
    """
    return jnp.clip(lengths - block * size - before, 0, size - before)
