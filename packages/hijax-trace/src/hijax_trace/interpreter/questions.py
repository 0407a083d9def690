"""Questions: what handlers asked, and whether they would be told the same elsewhere.

Every question that a handler asks through its call is logged: with the call, and in the frames
around the operation. What was made then is used again where every question has an equal answer: a
re-interpreted body (``memo``), and what a pure handler made of an operation (``answers``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

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

Told = Mapping[Question, Hashable]
"""What handlers were told, as keys that are equal where they must do the same."""


def is_told(told: Told, answer: Callable[[Question], Hashable]) -> bool:
    """Return whether every question has an equal answer here."""
    return all(answer(question) == before for question, before in told.items())


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
