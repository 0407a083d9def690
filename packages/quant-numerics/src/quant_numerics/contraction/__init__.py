"""Contractions without their operands: how each is quantized, run and trained."""
