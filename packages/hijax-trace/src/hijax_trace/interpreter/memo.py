"""Memo: re-interpreted programs, reused where their handlers would do the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from interception_core import ValueKind

from ..dataflow.dataflow import Express
from ..dataflow.flow import Origin
from ..dataflow.nodes import is_zero
from .frames import Metadata
from .numbers import Key


class Here(Protocol):
    """What handlers would see if a program was re-interpreted in this place."""

    def origin(self, index: int) -> Origin | None:
        """Return the origin of an input."""

    def path_key(self) -> Hashable:
        """Return what stands for the module path."""

    def number(self, key: Key) -> int:
        """Return how many operations of a key came before."""

    def expressions(self) -> Sequence[Express] | None:
        """Return what finds the expressions of the inputs."""

    def lengths(self) -> tuple[int | None, ...] | None:
        """Return how many steps the loops around have."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What handlers looked at while a program was re-interpreted.

    Where all of it is the same, they would do the same again. A field is None, or empty, if no
    handler looked.

    Attributes:
        origins: the origins of inputs, by number.
        path_key: what stood for the module path, in a tuple.
        numbers: how many operations of a key came before.
        is_parameter: the predicate with which they asked for the kinds of values.
        kinds: the kinds of the inputs, by that predicate; see ``Memo.kinds_of``.
        lengths: how many steps the loops around had, in a tuple.
    """

    origins: Mapping[int, Origin | None] = field(default_factory=dict)
    path_key: tuple[Hashable] | None = None
    numbers: Mapping[Key, int] = field(default_factory=dict)
    is_parameter: Callable[[str], bool] | None = None
    kinds: tuple[Hashable, ...] = ()
    lengths: tuple[tuple[int | None, ...] | None] | None = None


@dataclass(frozen=True, slots=True)
class Tapped:
    """A program after its handlers were asked.

    Attributes:
        jaxpr: open or closed, as the original is.
        extra: the values of its new leading inputs.
        metadata: the metadata of its results, by number.
        replaced: whether a handler replaced any operation.
        foreign: whether any of those values was not the operation's own result.
        counted: its operations, by module path below its own, label and name.
        takes_proxies: whether it takes the array proxies of its operands.
        unused: the inputs that it takes an array proxy for and does not use themselves.
        is_numbered: whether its last input is the number of the step.
        returned: the structures of the array proxies that it returns after its results, by result.
        seen: what its handlers looked at.
    """

    jaxpr: Any
    extra: tuple[Any, ...] = ()
    metadata: Mapping[int, Metadata] = field(default_factory=dict)
    replaced: bool = False
    foreign: bool = False
    counted: Mapping[Key, int] = field(default_factory=dict)
    takes_proxies: bool = False
    unused: tuple[int, ...] = ()
    is_numbered: bool = False
    returned: Mapping[int, Any] = field(default_factory=dict)
    seen: Seen = field(default_factory=Seen)


class Memo:
    """Keeps tapped programs for as long as the originals live.

    Args:
        resolve_origin: returns what stands for an input of the program, from its pytree path.
    """

    def __init__(self, resolve_origin: Callable[[str], Hashable]) -> None:
        self._resolve_origin = resolve_origin
        self._kept: weakref.WeakKeyDictionary[Any, dict[Hashable, list[Tapped]]] = (
            weakref.WeakKeyDictionary()
        )

    def find(self, jaxpr: Any, key: Hashable, here: Here) -> Tapped | None:
        """Return a tapped program whose handlers saw the same, or None.

        Args:
            jaxpr: the original, open.
            key: what must be equal in any case.
            here: what handlers would see now.
        """
        candidates = self._kept.get(jaxpr, {}).get(key, ())
        return next((one for one in candidates if self._sees_the_same(one.seen, here)), None)

    def keep(self, jaxpr: Any, key: Hashable, tapped: Tapped) -> None:
        """Keep what was made of ``jaxpr``."""
        self._kept.setdefault(jaxpr, {}).setdefault(key, []).append(tapped)

    def _sees_the_same(self, seen: Seen, here: Here) -> bool:
        if seen.path_key is not None and seen.path_key != (here.path_key(),):
            return False
        if seen.is_parameter is not None:
            kinds = self.kinds_of(here.expressions(), seen.is_parameter)
            if kinds != seen.kinds:
                return False
        if seen.lengths is not None and seen.lengths != (here.lengths(),):
            return False
        if any(here.number(key) != number for key, number in seen.numbers.items()):
            return False
        return all(self.is_same(here.origin(i), before) for i, before in seen.origins.items())

    def kinds_of(
        self, expressions: Sequence[Express] | None, is_parameter: Callable[[str], bool]
    ) -> tuple[Hashable, ...]:
        """Return the kinds of a program's inputs."""
        found = []
        for express in expressions or ():
            expression = express()
            kind = expression.judged(is_parameter)
            # A mask of zeros makes a view of a select; another constant does not.
            is_mask = kind.kind == "constant" and is_zero(expression)
            found.append((*self.key_of(kind), is_mask))
        return tuple(found)

    def key_of(self, kind: ValueKind) -> tuple[Hashable, ...]:
        """Return a key that is equal for kinds that handlers must treat alike."""
        keys = frozenset(map(self._resolve_origin, kind.paths))
        return *kind._replace(paths=frozenset()), keys

    def is_same(self, now: Origin | None, before: Origin | None) -> bool:
        """Return whether handlers must treat two origins alike."""
        if now is None or before is None or now == before:
            return now == before
        resolve = self._resolve_origin
        return now.axes == before.axes and resolve(now.path) == resolve(before.path)
