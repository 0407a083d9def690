"""Bridges: quantizes model objects of frameworks, and gives back objects of the same kind."""
