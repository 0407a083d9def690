"""Questions: what handlers asked, what came of it, and where they would be told the same.

Every question that a handler asks through its call is logged: with the call, and in the frames
around the operation. What was made then is used again where every question has an equal answer: a
re-interpreted body (``Memo``), and what a pure handler made of an operation (``answers``).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from interception_core import ValueKind

from ..dataflow.expression import Expression
from ..dataflow.flow import Origin
from ..dataflow.nodes import is_zero

PATH, STEPS, NUMBERS, EXPRESSION = "path", "steps", "numbers", "expression"
ORIGIN, KIND, KINDS, IS_ACTIVATION = "origin", "kind", "kinds", "is_activation"

Question = tuple[Any, ...]
"""One of these words, and what was asked about.

Of an operation handlers ask ``(ORIGIN, i)``, ``(KIND, i, is_parameter)`` and ``(IS_ACTIVATION, i,
is_parameter)``, which are about an operand, ``(PATH,)``, ``(STEPS,)``, ``(NUMBERS,)`` and
``(EXPRESSION,)``. What they make then depends on the same of the program around: on the origins of
its inputs, ``(ORIGIN, i)``, on the kinds of all of them, ``(KINDS, is_parameter)``, and on how many
operations came before, ``(NUMBERS, key)``.
"""

Metadata = Mapping[str, Any]
"""What handlers attached to one value."""


class Outcome(NamedTuple):
    """What came of asking handlers about the operations of a program.

    Attributes:
        metadata: the metadata of its results, by number.
        replaced: whether a handler replaced any operation.
        from_handler: whether any of those values was not the operation's own result.
    """

    metadata: Mapping[int, Metadata] = MappingProxyType({})
    replaced: bool = False
    from_handler: bool = False


Told = Mapping[Question, Hashable]
"""What handlers were told, as keys that are equal where they must do the same."""


class Keys:
    """Keys of answers, equal where handlers must do the same.

    Args:
        resolve_origin: returns what stands for an input of the program, from its pytree path.
    """

    def __init__(self, resolve_origin: Callable[[str], Hashable]):
        self._resolve_origin = resolve_origin

    def of_origin(self, origin: Origin | None) -> Hashable:
        """Return the key of the origin of a value."""
        return None if origin is None else (self._resolve_origin(origin.path), origin.axes)

    def of_kind(self, kind: ValueKind) -> tuple[Hashable, ...]:
        """Return the key of the kind of a value."""
        paths = frozenset(map(self._resolve_origin, kind.paths))
        return *kind._replace(paths=frozenset()), paths

    def of_kinds(
        self, expressions: Iterable[Expression], is_parameter: Callable[[str], bool]
    ) -> Hashable:
        """Return the key of the kinds of a program's inputs."""
        found = []
        for expression in expressions:
            kind = expression.judged(is_parameter)
            # A mask of zeros makes a view of a select; another constant does not.
            is_mask = kind.kind == "constant" and is_zero(expression)
            found.append((*self.of_kind(kind), is_mask))
        return tuple(found)


class Memo:
    """Keeps tapped programs for as long as the originals live."""

    def __init__(self) -> None:
        self._kept: weakref.WeakKeyDictionary[Any, dict[Hashable, list[Any]]] = (
            weakref.WeakKeyDictionary()
        )

    def find(self, jaxpr: Any, key: Hashable, answer: Callable[[Question], Hashable]) -> Any | None:
        """Return a tapped program whose handlers would be told the same here, or None."""
        for one in self._kept.get(jaxpr, {}).get(key, ()):
            if all(answer(question) == before for question, before in one.told.items()):
                return one
        return None

    def keep(self, jaxpr: Any, key: Hashable, tapped: Any) -> None:
        """Keep what was made of ``jaxpr``."""
        self._kept.setdefault(jaxpr, {}).setdefault(key, []).append(tapped)
