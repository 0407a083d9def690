"""The public names, and the modules that they are from."""

from .array import CacheArray as CacheArray
from .rule import CachePlan as CachePlan
from .rule import CacheRule as CacheRule

__version__: str
