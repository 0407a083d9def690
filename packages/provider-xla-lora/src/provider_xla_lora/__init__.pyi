"""The public names, and the modules that they are from."""

from .rule import Lora as Lora
from .rule import LoraForm as LoraForm
from .rule import LoraRule as LoraRule
from .weight import LoraWeight as LoraWeight

__version__: str
