"""Rules: what to do with which operations."""
