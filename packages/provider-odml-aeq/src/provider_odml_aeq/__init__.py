"""provider-odml-aeq: quantize exported files after training, by ai-edge-quantizer.

Importing this package imports neither jax nor ai-edge-quantizer.
"""

from importlib.metadata import version

from interception_core import lazy_exports

__version__ = version("provider-odml-aeq")
__getattr__, __dir__, __all__ = lazy_exports(__name__)
