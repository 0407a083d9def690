"""Quantized arrays, and quantized dot_general, einsum and convolution, as pure JAX functions.

Importing this package does not import jax, so that plugin discovery stays light.
"""

from importlib.metadata import version

from interception_core import lazy_exports

__version__ = version("quant-numerics")
__getattr__, __dir__, __all__ = lazy_exports(__name__)
