"""Passes: change parameters with data before they are rounded."""
