"""Products of floats, or of codes with scales, after Transformer Engine."""
