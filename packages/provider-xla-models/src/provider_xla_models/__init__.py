"""provider-xla-models: model objects of Flax NNX, Flax Linen and Equinox, for provider-xla.

Importing this package does not import jax, so that plugin discovery stays light.
"""

from importlib.metadata import version

from interception_core import lazy_exports

__version__ = version("provider-xla-models")
__getattr__, __dir__, __all__ = lazy_exports(__name__)
