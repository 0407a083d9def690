"""What packages need that add features to plans, or stored forms that hold another one: public.

Each name is imported when it is first used, so that a stored form loads without the planner.
"""

from interception_core import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
