"""Staging: calls in a staged program whose handlers are asked later."""
