"""Fake quantization to the average of a tensor's ranges."""
