"""provider-odml-export: write what provider-odml trained to a verified .tflite.

Importing this package does not import jax, so that plugin discovery stays light.
"""

from importlib.metadata import version

from interception_core import lazy_exports

__version__ = version("provider-odml-export")
__getattr__, __dir__, __all__ = lazy_exports(__name__)
