"""Routers of mixtures of experts, as Transformer Engine's targets."""
