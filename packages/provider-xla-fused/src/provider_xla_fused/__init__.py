"""provider-xla-fused: softmax, attention, norms and activations, by one kernel each.

Importing this package does not import jax, so that plugin discovery stays light.
"""

from importlib.metadata import version

from interception_core import lazy_exports

__version__ = version("provider-xla-fused")
__getattr__, __dir__, __all__ = lazy_exports(__name__)
