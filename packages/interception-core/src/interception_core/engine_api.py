"""The API for authors of engines.

An engine is an object with `wrap(fn, interceptor) -> fn`. It may use `Taps`, which finds the
targets and runs a function with them tapped. `Taps` calls `on_call` at each call of a tapped
function, and an `Observer` at each primitive that meets a transformation. With `patch_calls`, an
engine changes what JAX does meanwhile. `check_wrapped` checks what it is given. An engine gives
handlers a subclass of `interception_core.OpCall`.

Importing this module imports JAX.
"""

from ._compat import SETTLED, is_settled, settled
from .engine import check_wrapped
from .patch.dispatch import TappedCall
from .patch.patches import Patch, patch_calls
from .patch.scope import Observer
from .patch.taps import OnCall, Taps

__all__ = [
    "SETTLED",
    "Observer",
    "OnCall",
    "Patch",
    "TappedCall",
    "Taps",
    "check_wrapped",
    "is_settled",
    "patch_calls",
    "settled",
]
