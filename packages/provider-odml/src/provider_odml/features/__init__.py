"""What packages need that write files of trained programs: public.

Each name is imported when it is first used, so that reading a file does not import jax.
"""

from interception_core import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
