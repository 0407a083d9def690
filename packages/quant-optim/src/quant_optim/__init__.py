"""quant-optim: Adam with moments of 8 bits, as optax transformations."""

from importlib.metadata import version

from .adam import ScaleByAdam8bitState, adam_8bit, adamw_8bit, scale_by_adam_8bit
from .moments import Moment, first_moment, restored, second_moment

__version__ = version("quant-optim")
__all__ = [
    "Moment",
    "ScaleByAdam8bitState",
    "adam_8bit",
    "adamw_8bit",
    "first_moment",
    "restored",
    "scale_by_adam_8bit",
    "second_moment",
]
