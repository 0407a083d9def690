"""``jaxtap demo-xla``: two small models on handwritten digits, in float, int8 and int4."""

from ._command import configure, run

__all__ = ["configure", "run"]
