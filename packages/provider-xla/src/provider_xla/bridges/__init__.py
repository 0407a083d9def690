"""Bridges: quantize the model objects of frameworks, in their own classes."""
