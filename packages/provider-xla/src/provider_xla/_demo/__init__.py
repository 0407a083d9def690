"""``jaxtap demo``: two small models on scikit-learn's handwritten digits, in float and in int8."""

from ._command import configure, run

__all__ = ["configure", "run"]
