"""The public names, and the modules that they are from."""

from .backend import AeqBackend as AeqBackend

__version__: str
