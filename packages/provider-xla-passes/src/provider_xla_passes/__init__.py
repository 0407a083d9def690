"""provider-xla-passes: better rounding from data, and bits by budget.

Importing this package does not import jax, so that plugin discovery stays light.
"""

from importlib.metadata import version

from interception_core import lazy_exports

__version__ = version("provider-xla-passes")
__getattr__, __dir__, __all__ = lazy_exports(__name__)
