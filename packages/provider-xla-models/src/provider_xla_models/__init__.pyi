"""The public names, and the modules that they are from."""

from .equinox import EquinoxBridge as EquinoxBridge
from .linen import LinenBridge as LinenBridge
from .nnx import NnxBridge as NnxBridge

__version__: str
