"""What packages need that read and write files of other libraries: public.

Each name is imported when it is first used: a few need msgspec, which not all of them have.
"""

from interception_core import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
