"""Conformance suites: what every bridge and every stored form does. They need pytest."""

from .bridges import BridgeConformance
from .forms import StoredFormConformance

__all__ = ["BridgeConformance", "StoredFormConformance"]
