"""provider-xla-lora: LoRA and QLoRA by rule, float adapters beside stored or float parameters.

Importing this package does not import jax, so that plugin discovery stays light.
"""

from importlib.metadata import version

from interception_core import lazy_exports

__version__ = version("provider-xla-lora")
__getattr__, __dir__, __all__ = lazy_exports(__name__)
