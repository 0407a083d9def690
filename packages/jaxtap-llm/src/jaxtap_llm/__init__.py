"""jaxtap-llm: language models from a folder of Hugging Face to tokens, quantized by rules.

Importing this package does not import jax, so that plugin discovery stays light.
"""

from importlib.metadata import version

from interception_core import lazy_exports

__version__ = version("jaxtap-llm")
__getattr__, __dir__, __all__ = lazy_exports(__name__)
