"""Memo: re-interpreted programs, reused where their handlers would do the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from .frames import Metadata
from .op_ids import Key
from .questions import Question, Told, is_told


@dataclass(frozen=True, slots=True)
class Tapped:
    """A program after its handlers were asked.

    Attributes:
        jaxpr: open or closed, as the original is.
        extra: the values of its new leading inputs.
        metadata: the metadata of its results, by number.
        replaced: whether a handler replaced any operation.
        from_handler: whether any of those values was not the operation's own result.
        counted: its operations, by module path below its own, label and name.
        takes_proxies: whether it takes the array proxies of its operands.
        unused: the inputs that it takes an array proxy for and does not use themselves.
        is_numbered: whether its last input is the number of the step.
        returned: the structures of the array proxies that it returns after its results, by result.
        told: what its handlers were told.
    """

    jaxpr: Any
    extra: tuple[Any, ...] = ()
    metadata: Mapping[int, Metadata] = field(default_factory=dict)
    replaced: bool = False
    from_handler: bool = False
    counted: Mapping[Key, int] = field(default_factory=dict)
    takes_proxies: bool = False
    unused: tuple[int, ...] = ()
    is_numbered: bool = False
    returned: Mapping[int, Any] = field(default_factory=dict)
    told: Told = field(default_factory=dict)


class Memo:
    """Keeps tapped programs for as long as the originals live."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[Any, dict[Hashable, list[Tapped]]] = (
            weakref.WeakKeyDictionary()
        )

    def find(
        self, jaxpr: Any, key: Hashable, answer: Callable[[Question], Hashable]
    ) -> Tapped | None:
        """Return a tapped program whose handlers would be told the same here, or None.

        Args:
            jaxpr: the original, open.
            key: what must be equal in any case.
            answer: answers a question about the program in this place.
        """
        candidates = self._kept.get(jaxpr, {}).get(key, ())
        return next((one for one in candidates if is_told(one.told, answer)), None)

    def keep(self, jaxpr: Any, key: Hashable, tapped: Tapped) -> None:
        """Keep what was made of ``jaxpr``."""
        self._kept.setdefault(jaxpr, {}).setdefault(key, []).append(tapped)
