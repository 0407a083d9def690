"""Op ids: how operations are counted, and what an equation's name stack tells of its place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from interception_core.engine_api import SETTLED

from .. import compat

Key = tuple[str, str, str]
"""Module path, label and operation name."""


def join_path(*parts: str) -> str:
    """Join the parts of a module path, without those that are empty."""
    return "/".join(filter(None, parts))


def under(path: str, key: Key) -> Key:
    """Return a key that is relative to a module path, as absolute."""
    return join_path(path, key[0]), *key[1:]


class Numbers(dict[Key, int]):
    """How many operations there have been of each key."""

    def next(self, path: str, label: str, name: str) -> int:
        """Count one operation. Return how many there were before it."""
        key = (path, label, name)
        number = self.get(key, 0)
        self[key] = number + 1
        return number

    def since(self, before: Numbers) -> dict[Key, int]:
        """Return what has been counted since there was ``before``."""
        return {key: n - before.get(key, 0) for key, n in self.items() if n != before.get(key, 0)}

    def add(self, counted: Mapping[Key, int], path: str = "") -> None:
        """Add numbers whose keys are relative to a module path."""
        for key, number in counted.items():
            key = under(path, key)
            self[key] = self.get(key, 0) + number

    def copy(self) -> Numbers:
        """Return a copy, which is counted on separately."""
        return Numbers(self)


class OfRule(NamedTuple):
    """Which operations of a derivative rule are those of its function.

    A rule runs instead of its function, so that what it computes of the same values has the ids of
    the function's operations. Operations on tangents, and those that only the rule has, are not in
    the program. With the next numbers they would have the ids of the operations after the call.

    Attributes:
        label: ends the label of operations that only the rule has.
        ends: the numbers after the function's operations.
    """

    label: str
    ends: Numbers

    def label_of(self, numbers: Numbers, key: Key, is_linear: bool) -> str:
        """Return the label of an operation in the rule.

        Args:
            numbers: how many operations of each key there were before it.
            key: its key if the function has it.
            is_linear: whether the rule must be linear in an operand.
        """
        if not is_linear and numbers.get(key, 0) < self.ends.get(key, 0):
            return key[1]
        return ".".join(filter(None, (key[1], self.label)))


OURS = "jaxtap."
"""Prefix of the name scopes that jaxtap adds to a program."""
WITHIN = "jaxtap.within."
"""Prefix of the name scope of a function whose handler was asked early and let it run."""
_NOTHING: frozenset[str] = frozenset()

Where = tuple[Any, Sequence[str], frozenset[str], bool]
"""The ``stack``, ``scopes``, ``within`` and ``settled`` of a task."""


def where_of(stack: Any) -> Where:
    """Return what a name stack tells of an equation, and the stack without jaxtap's scopes."""
    if not len(stack):
        return stack, (), _NOTHING, False
    settled, within, scopes, ours = False, [], [], set()
    for name in compat.scopes_of(stack):
        if not name.startswith(OURS):
            scopes.append(name)
            continue
        ours.add(name)
        settled |= name.startswith(SETTLED)
        if name.startswith(WITHIN):
            within.append(name.removeprefix(WITHIN))
    if not ours:
        return stack, scopes, _NOTHING, False
    return compat.stack_without(stack, ours), scopes, frozenset(within), settled
