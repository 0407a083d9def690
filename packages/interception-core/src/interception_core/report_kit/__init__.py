"""Report pages: a base page, sortable tables, charts, and numbers.

Charts need no library. Pages (`Column`, `charts`, `render`) need the extra `report` (Jinja), which
is imported when one of these names is first used.
"""

from ..lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
