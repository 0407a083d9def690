"""Where the sequences of a batch are."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

_Pair = tuple[jax.Array, jax.Array]


@jax.tree_util.register_pytree_node_class
class SequenceDescriptor:
    """Lengths and positions of query and key sequences; see the class methods."""

    def __init__(
        self,
        seqlens: _Pair | None = None,
        seq_offsets: _Pair | None = None,
        segment_ids: _Pair | None = None,
        segment_pos: _Pair | None = None,
    ) -> None:
        self.seqlens = _or_empty(seqlens)
        self.seq_offsets = _or_empty(seq_offsets)
        self.segment_ids = _or_empty(segment_ids)
        self.segment_pos = _or_empty(segment_pos)

    def tree_flatten(self) -> tuple[tuple[Any, ...], None]:
        """Return it as a pytree."""
        return (self.seqlens, self.seq_offsets, self.segment_ids, self.segment_pos), None

    @classmethod
    def tree_unflatten(cls, aux_data: None, children: tuple[Any, ...]) -> SequenceDescriptor:
        """Return the descriptor of a pytree."""
        made = object.__new__(cls)
        made.seqlens, made.seq_offsets, made.segment_ids, made.segment_pos = children
        return made

    @classmethod
    def from_seqlens(cls, seqlens: jax.Array | _Pair) -> SequenceDescriptor:
        """Describe one sequence per batch entry by integer lengths [b]."""
        return cls(seqlens=_pair("seqlens", seqlens))

    @classmethod
    def from_seqlens_and_offsets(
        cls, seqlens: jax.Array | _Pair, seq_offsets: jax.Array | _Pair
    ) -> SequenceDescriptor:
        """Describe several segments per batch entry, for THD layouts.

        Args:
            seqlens: integers [b, n]; what is not used is -1 or 0.
            seq_offsets: where they begin in their batch entry, [b, n + 1] or [b, n]; what is not
                used is -1.
        """
        return cls(seqlens=_pair("seqlens", seqlens), seq_offsets=_pair("seq_offsets", seq_offsets))

    @classmethod
    def from_segment_ids_and_pos(
        cls, segment_ids: jax.Array | _Pair, segment_pos: jax.Array | _Pair
    ) -> SequenceDescriptor:
        """Describe segments by the segment and position of each token.

        Args:
            segment_ids: integers [b, s], from 1 on for tokens and 0 for padding. A segment's tokens
                are side by side; without a THD layout there is one per batch entry, at its start.
            segment_pos: the place of each token in its segment, counted from 0, in their order.
        """
        return cls(
            segment_ids=_pair("segment_ids", segment_ids),
            segment_pos=_pair("segment_pos", segment_pos),
        )


def _or_empty(pair: _Pair | None) -> _Pair:
    empty = jnp.zeros((0,), jnp.int32)
    return (empty, empty) if pair is None else pair


def _pair(name: str, given: jax.Array | _Pair) -> _Pair:
    if isinstance(given, tuple):
        if len(given) != 2:
            raise ValueError(
                f"SequenceDescriptor: {name} must have 2 arrays, of queries and of keys, "
                f"got {len(given)}"
            )
        return given
    return given, given
