"""The public names, and the modules that they are from."""

from .patterns.attention import Attention as Attention
from .patterns.find import attention as attention

__version__: str
