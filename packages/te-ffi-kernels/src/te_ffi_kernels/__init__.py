"""Matrix and quantization kernels for JAX on CPU, warmed up before use.

Importing this package does not import jax, so that plugin discovery stays light. ``__init__.pyi``
lists the public names and their modules, for this module and for type checkers.
"""

from importlib.metadata import version

from interception_core import lazy_exports

__version__ = version("te-ffi-kernels")
__getattr__, __dir__, __all__ = lazy_exports(__name__)
