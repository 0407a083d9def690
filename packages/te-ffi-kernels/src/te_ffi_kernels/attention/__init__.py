"""Fused attention, with Transformer Engine's arguments and mathematics."""
