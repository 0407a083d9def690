"""Which module paths the rules can tell apart.

A jitted function that is called under two paths may share one trace if no rule can ever treat
the two apart: not there, and not under any name scope that the function opens inside. For a
regular expression that is a question about its finite automaton: both paths must lead to the
same state (Myhill and Nerode).
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Hashable, Iterable
from typing import Any

import interegular

_SEPARATOR = "/"
# "(a|b)*a(a|b){n}" has 2**n states: 0.1 s of work for 8 repeats, half a minute for 12.
_COUNTED = re.compile(r"\{(?:\d*,)?(\d+),?\}")
_MOST_REPEATS = 8
_LONGEST = 500


class PathKeys:
    """Map module paths to keys; equal keys match the same patterns.

    Args:
        patterns: regular expressions that are matched with whole paths.
    """

    def __init__(self, patterns: Iterable[str]):
        automata = [_automaton(pattern) for pattern in patterns]
        known = [automaton for automaton in automata if automaton is not None]
        # If a pattern has no automaton (it has a back reference, say), each path is its own key.
        self._automata = known if len(known) == len(automata) else None
        self._key = functools.lru_cache(maxsize=None)(self._find_key)

    def __call__(self, path: str) -> Hashable:
        """Return the key of ``path``."""
        return self._key(path)

    def _find_key(self, path: str) -> Hashable:
        if self._automata is None:
            return path
        return tuple(_state(automaton, path) for automaton in self._automata)


def _automaton(pattern: str) -> interegular.FSM | None:
    """Return ``pattern``'s smallest automaton; None without a small one."""
    repeats = math.prod(map(int, _COUNTED.findall(pattern)))
    if len(pattern) > _LONGEST or repeats > _MOST_REPEATS:
        return None
    try:
        return interegular.parse_pattern(pattern).to_fsm().reduce()
    except (interegular.Unsupported, interegular.InvalidSyntax):
        return None


def _state(automaton: interegular.FSM, path: str) -> tuple[bool, Any]:
    """Return whether ``path`` matches, and the state for paths below."""
    state = _follow(automaton, automaton.initial, path)
    below = _follow(automaton, state, _SEPARATOR) if path else state
    return state in automaton.finals, below


def _follow(automaton: interegular.FSM, state: Any, text: str) -> Any:
    """Return the state after ``text``; None if nothing can match."""
    for character in text:
        if state is None:
            return None
        moves: Any = automaton.map.get(state, {})
        state = moves.get(automaton.alphabet[character])
    return state if state is None or automaton.islive(state) else None
