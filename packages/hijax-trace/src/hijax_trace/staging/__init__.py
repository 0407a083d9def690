"""Staging: what stands in a staged program for a call whose handler is asked later."""
