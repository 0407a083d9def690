"""What the tests of jaxtap's packages share; ``plugin`` is loaded by pytest, the rest on import."""

from .tiers import examples

__all__ = ["examples"]
