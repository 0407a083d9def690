"""Attention over a cache, as in decoding."""
