"""``jaxtap demo-xla``: two small models on handwritten digits, in float, int8 and int4.

Models and training are public: examples and benchmarks use them too. The digits are
`interception_core.demo_kit.Digits`.
"""

from .models import MODELS, Model
from .training import train

__all__ = ["MODELS", "Model", "train"]
