"""Memo: what was made of a program, to be used again where its handlers would do the same."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..dataflow.dataflow import Express
from ..dataflow.flow import Origin
from ..dataflow.nodes import is_zero
from .frames import Key, Metadata


@dataclass(frozen=True, slots=True)
class Tapped:
    """A program with its handlers' work in it.

    Attributes:
        jaxpr: open or closed, as the original is.
        extra: the values of its new leading inputs.
        metadata: the metadata of its results, by number.
        replaced: whether any operation was.
        counted: its operations, by module path below its own, label and name.
        read: the origins of its inputs that handlers looked at, by number.
        path: what stands for the module path that they looked at.
        path_was_read: whether they did.
        taken: whether it takes the array proxies of its operands.
        unused: its inputs that it takes an array proxy for, and does not use themselves.
        foreign: whether any operation's value was replaced by one that is not its own.
        before: how many such operations there were before, as ``counted``, if handlers looked at
            their numbers.
        is_parameter: by which handlers have asked for the kinds of values; None if they have not.
        kinds: those of its inputs then; see ``kinds_of``.
        steps_were_read: whether handlers looked at the loops around.
        lengths: how many steps those have, then.
        is_numbered: whether the number of the step is its last input.
    """

    jaxpr: Any
    extra: tuple[Any, ...]
    metadata: Mapping[int, Metadata]
    replaced: bool
    counted: Mapping[Key, int]
    read: Mapping[int, Origin | None]
    path: Hashable
    path_was_read: bool
    taken: bool
    before: Mapping[Key, int] | None = None
    unused: tuple[int, ...] = ()
    foreign: bool = False
    is_parameter: Callable[[str], bool] | None = None
    kinds: tuple[Hashable, ...] = ()
    steps_were_read: bool = False
    lengths: tuple[int | None, ...] | None = None
    is_numbered: bool = False


class Memo:
    """Keeps tapped programs for as long as the originals live.

    Args:
        resolve_origin: what stands for an input of the program.
    """

    def __init__(self, resolve_origin: Callable[[str], Hashable]) -> None:
        self._resolve_origin = resolve_origin
        self._kept: weakref.WeakKeyDictionary[Any, dict[Hashable, list[Tapped]]] = (
            weakref.WeakKeyDictionary()
        )

    def find(
        self,
        jaxpr: Any,
        key: Hashable,
        origin: Callable[[int], Origin | None],
        path: Callable[[], Hashable],
        count: Callable[[Key], int],
        expressions: Callable[[], Sequence[Express] | None],
        lengths: Callable[[], tuple[int | None, ...] | None],
    ) -> Tapped | None:
        """Return what was made of ``jaxpr`` where all that its handlers looked at was the same.

        Args:
            jaxpr: the original, open.
            key: what must be the same in any case.
            origin: tells the origin of an input now.
            path: tells what stands for the module path now.
            count: tells how many such operations there were before.
            expressions: returns what finds how its inputs are computed.
            lengths: tells how many steps the loops around have.
        """
        for tapped in self._kept.get(jaxpr, {}).get(key, ()):
            if tapped.path_was_read and tapped.path != path():
                continue
            if tapped.is_parameter is not None and tapped.kinds != self.kinds_of(
                expressions(), tapped.is_parameter
            ):
                continue
            if tapped.steps_were_read and tapped.lengths != lengths():
                continue
            before = tapped.before or {}
            if any(count(key) != number for key, number in before.items()):
                continue
            if all(self._same(origin(index), before) for index, before in tapped.read.items()):
                return tapped
        return None

    def kinds_of(
        self, expressions: Sequence[Express] | None, is_parameter: Callable[[str], bool]
    ) -> tuple[Hashable, ...]:
        """Return what the kinds of the values in a program depend on: those of its inputs."""
        found = []
        for express in expressions or ():
            expression = express()
            kind = expression.judged(is_parameter)
            keys = frozenset(map(self._resolve_origin, kind.paths))
            # A mask of zeros is one because of its value.
            is_mask = kind.kind == "constant" and is_zero(expression)
            found.append((*kind._replace(paths=frozenset()), keys, is_mask))
        return tuple(found)

    def _same(self, now: Origin | None, before: Origin | None) -> bool:
        if now is None or before is None or now == before:
            return now == before
        resolve = self._resolve_origin
        return now.axes == before.axes and resolve(now.path) == resolve(before.path)

    def keep(self, jaxpr: Any, key: Hashable, tapped: Tapped) -> None:
        """Keep what was made of ``jaxpr``."""
        self._kept.setdefault(jaxpr, {}).setdefault(key, []).append(tapped)
