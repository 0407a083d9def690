"""Report pages: a base page, sortable tables, charts, and numbers.

Charts need no library. Pages (`Column`, `charts`, `render`) need the extra `report` (Jinja), which
is imported when one of these names is first used.
"""

import importlib
from typing import TYPE_CHECKING, Any

from .bars import FIRST, SECOND, WARN, Bar, Row, chart, shorten
from .numbers import show_bytes, show_share, show_sqnr

if TYPE_CHECKING:
    from .page import Column, charts, render

__all__ = [
    "FIRST",
    "SECOND",
    "WARN",
    "Bar",
    "Column",
    "Row",
    "chart",
    "charts",
    "render",
    "shorten",
    "show_bytes",
    "show_share",
    "show_sqnr",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".page", __name__), name)
