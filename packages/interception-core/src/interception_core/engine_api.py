"""For authors of engines: what engines are built on.

An engine is an object with `wrap(fn, interceptor) -> fn`. One that lets the program itself run
has `Taps`, which finds the targets and runs a function with them tapped: its `on_call` is asked at
each call of a tapped function, and its `Observer` at each primitive that meets a transformation.
What handlers are given is a subclass of `interception_core.OpCall`.

Importing this module imports JAX.
"""

from ._compat import AHEAD, SETTLED, is_settled, known_ahead, settled, unknown_ahead
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
    "known_ahead",
    "settled",
    "unknown_ahead",
]
