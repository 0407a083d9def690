"""Derivatives that differ from those of the function itself."""
