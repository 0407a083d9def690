"""What providers ask of an engine."""

from __future__ import annotations

from interception_core import Engine


def follows_values(engine: Engine) -> bool:
    """Return whether an engine follows values through a program.

    One that does knows views and derived weights, sees lookups as primitives with JIT on, and
    hands stored parameters to the operations that use them.
    """
    return bool(getattr(engine, "follows_values", False))
