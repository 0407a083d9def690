"""provider-xla: quantizes the matmuls and convolutions of a JAX program, JIT on.

Importing this package does not import jax, so that plugin discovery stays light.
"""

from importlib.metadata import version

from interception_core import lazy_exports

__version__ = version("provider-xla")
__getattr__, __dir__, __all__ = lazy_exports(__name__)
