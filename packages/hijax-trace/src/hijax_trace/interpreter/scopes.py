"""Scopes: what an equation's name stack tells."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from interception_core.engine_api import SETTLED

from .. import compat

OURS = "jaxtap."
"""Prefix of the name scopes that jaxtap adds to a program."""
WITHIN = "jaxtap.within."
"""Prefix of the name scope of a function whose handler was asked early and let it run."""
_NOTHING: frozenset[str] = frozenset()

Where = tuple[Any, Sequence[str], frozenset[str], bool]
"""The ``stack``, ``scopes``, ``within`` and ``settled`` of a task."""


def where_of(stack: Any) -> Where:
    """Return what a name stack tells of an equation."""
    if not len(stack):
        return stack, (), _NOTHING, False
    scopes = compat.scopes_of(stack)
    if any(name.startswith(OURS) for name in scopes):
        return _cleaned(scopes, stack)
    return stack, scopes, _NOTHING, False


def _cleaned(names: Sequence[str], stack: Any) -> Where:
    """Take jaxtap's scopes out of a name stack."""
    settled, within, scopes = False, [], []
    for name in names:
        if name.startswith(SETTLED):
            settled = True
        elif name.startswith(WITHIN):
            within.append(name.removeprefix(WITHIN))
        elif not name.startswith(OURS):
            scopes.append(name)
    ours = {name for name in names if name.startswith(OURS)}
    return compat.stack_without(stack, ours), scopes, frozenset(within), settled
