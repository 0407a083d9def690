"""Layer norm and RMS norm, after Transformer Engine."""
