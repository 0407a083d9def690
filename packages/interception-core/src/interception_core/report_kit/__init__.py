"""What pages of reports are made of: charts that need no library and no network."""

from .bars import FIRST, SECOND, WARN, Bar, Row, chart, shorten

__all__ = ["FIRST", "SECOND", "WARN", "Bar", "Row", "chart", "shorten"]
