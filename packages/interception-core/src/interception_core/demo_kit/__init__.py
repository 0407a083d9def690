"""The kit of providers' demos: digits, training, and command options.

Needs the extra `demo`. Importing this package imports neither jax nor the libraries of the extra.
"""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
