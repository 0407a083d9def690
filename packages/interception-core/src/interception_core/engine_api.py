"""The API for authors of engines.

An engine is an object with `wrap(fn, interceptor) -> fn`. It may use `Taps`, which finds the
targets and runs a function with them tapped. `Taps` calls `on_call` at each call of a tapped
function, and an `Observer` at each primitive that meets a transformation. An engine gives handlers
a subclass of `interception_core.OpCall`.

Importing this module imports JAX.
"""

from ._compat import (
    AHEAD,
    SETTLED,
    is_settled,
    is_transposing,
    known_ahead,
    settled,
    unknown_ahead,
)
from .patch.dispatch import TappedCall
from .patch.scope import Observer
from .patch.taps import OnCall, Taps

__all__ = [
    "AHEAD",
    "SETTLED",
    "Observer",
    "OnCall",
    "TappedCall",
    "Taps",
    "is_settled",
    "is_transposing",
    "known_ahead",
    "settled",
    "unknown_ahead",
]
