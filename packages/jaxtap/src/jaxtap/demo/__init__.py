"""``jaxtap demo-xla``: two small models in float, int8 and int4.

They classify handwritten digits. Models and training are public: examples and benchmarks use them,
too. The digits are
`interception_core.demo_kit.Digits`.
"""

from .models import MODELS, Model
from .training import train

__all__ = ["MODELS", "Model", "train"]
