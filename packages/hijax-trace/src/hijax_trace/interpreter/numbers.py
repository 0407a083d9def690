"""Numbers: how operations are counted for op ids."""

from __future__ import annotations

from collections.abc import Mapping

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
