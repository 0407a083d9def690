"""Helpers that the tests of jaxtap's packages share."""

from .tiers import examples

__all__ = ["examples"]
