"""Activations, plain and gated, after Transformer Engine."""
