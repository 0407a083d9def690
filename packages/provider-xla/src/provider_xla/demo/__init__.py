"""``jaxtap demo-xla``: two small models on handwritten digits, in float, int8 and int4.

Models, data and training are public: examples and benchmarks use them too.
"""

from .models import MODELS, Model
from .training import Digits, train

__all__ = ["MODELS", "Digits", "Model", "train"]
